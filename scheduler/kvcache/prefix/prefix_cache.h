// The prefix cache: committed page groups that can be found by the contents of their rows.
//
// A published group has a node, and the cache holds one reference to the group. Nodes of whole
// pages are found by key. Nodes with tokens are also found by agreeing rows, among the nodes with
// the same parent. A group that the cache alone holds is idle: it stays until its room is needed,
// the least recently used of its layout first (slab_pool.h). A sequence that ends gives its pages
// back from the last to the first, so the ends of long prefixes go before their beginnings.
//
// A published group is never written again: writers see more than one reference and copy. So the
// result of Find cannot be stale, and a caller that shares the group keeps it.
//
// If rows have copies in slower tiers (CopiesOutside), a node may outlive its group: it is demoted,
// and found without one, until the rows are back.
//
// Costs: Find and Publish look at one key and at most kMostSiblings nodes, and evictions are O(1).
// MakeRoom searches the slabs if a layout's own idle groups do not suffice. Memory: a node for each
// group of the pool and of the slower tiers at most, with 4 bytes a row. Threading: owned by the
// KvCache that holds it.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CACHE_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CACHE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "scheduler/kvcache/pool/page_work.h"
#include "scheduler/kvcache/pool/slab_pool.h"
#include "scheduler/kvcache/prefix/event_log.h"
#include "scheduler/kvcache/prefix/page_directory.h"
#include "scheduler/kvcache/prefix/prefix_chain.h"

namespace mla::kvcache {

struct PrefixMatch {
  int32_t rows = 0;  // rows added to the sequence
  MatchEnd end = MatchEnd::kNotAsked;
};

struct PrefixStats {
  std::array<uint64_t, kMatchEnds> ends = {};  // matches by where they ended
  uint64_t hits = 0;                           // matches that found rows
  uint64_t rows_asked = 0, rows_found = 0;
  uint64_t published = 0;   // groups
  uint64_t superseded = 0;  // nodes dropped because a node with more rows contains theirs
  uint64_t evicted = 0;     // groups whose room was needed, in the pool or in the last tier
  uint64_t demoted = 0;     // groups that left the pool while their rows stay in a slower tier
  uint64_t restored = 0;    // demoted groups that came back to the pool
  uint64_t freed = 0;       // groups that came back to the pool, for any reason
  int64_t nodes = 0;
  uint64_t steps = 0;  // keys and nodes visited; shows what an operation costs
};

// Copies of nodes in slower tiers, by the index of the node.
class CopiesOutside {
 public:
  virtual ~CopiesOutside() = default;
  virtual bool Has(int32_t node) const = 0;
  // Returns true if its rows are being restored, or wait for that.
  virtual bool Comes(int32_t node) const = 0;
  // Returns the fastest of the tiers that have its rows. REQUIRES: Has.
  virtual Tier Fastest(int32_t node) const = 0;
  // Forgets the node, whose index may then be used for another one.
  virtual void Forget(int32_t node) = 0;
};

class PrefixCache final {
 public:
  static constexpr int32_t kNone = -1;
  // FindRows compares at most this many nodes with the same parent, the latest first.
  static constexpr int32_t kMostSiblings = 32;

  struct Found {
    uint32_t entry = SlabPool::kNoEntry;  // kNoEntry although there are rows: the node is demoted
    int32_t rows = 0;
    int32_t node = kNone;
  };
  // Describes a node.
  struct About {
    LayoutId layout = -1;
    uint32_t entry = SlabPool::kNoEntry;  // kNoEntry: demoted
    TenantKey tenant = 0;
    int32_t uses = 0;  // matches that took its rows
    bool demoted() const { return entry == SlabPool::kNoEntry; }
  };

  PrefixCache(SlabPool* pool, PageWorkQueue* work);

  // Returns the group of the chain's whole page `page`, or none.
  Found Find(LayoutId layout, const PrefixChain& chain, int32_t page);
  // Returns the group that agrees with most of the page's first `rows` rows, from the first one on;
  // none if not even that one agrees. `in_pool`: demoted nodes are passed over.
  Found FindRows(LayoutId layout, const PrefixChain& chain, int32_t page, int32_t rows,
                 bool in_pool = false);
  // Returns the reason why Find has found nothing.
  MatchEnd WhyAbsent(LayoutId layout, const PrefixChain& chain, int32_t page) const;
  void CountMatch(MatchEnd end, int32_t asked, int32_t matched);

  // Offers a group that holds the page's first `rows` rows, committed at every layer. Returns false
  // and does nothing if the group is cached already or still has to be filled, or if another group
  // of the pool has the same rows. REQUIRES: rows = page_size, or fewer if the chain has tokens.
  bool Publish(LayoutId layout, const PrefixChain& chain, int32_t page, int32_t rows,
               uint32_t entry);
  // Makes evictions events of the log from now on, or of none if it is null. The log outlives the
  // cache.
  void set_events(EventLog* events) { events_ = events; }
  // Evicts idle groups so that `groups` more can be taken for the layout, which Take has just
  // refused for `why`. Counts first: if that would not give enough room, evicts nothing and returns
  // false. Groups of the layout go first, then whole slabs of other layouts.
  bool MakeRoom(LayoutId layout, int64_t groups, TakeRefusal why);

  // --- Hints
  static constexpr int32_t kMostPriority = 3;
  // The most groups that are passed over to find the one to evict.
  static constexpr int32_t kMostPassedOver = 16;
  // Sets how often the node's group is passed over before it is evicted.
  void SetPriority(int32_t node, int32_t priority) { At(node).priority = priority; }
  // Keeps the group in the pool until Unpin. Returns the pin's id; every pin has a new one.
  // REQUIRES: the node is not demoted.
  uint64_t Pin(int32_t node);
  // Does nothing unless the node has this pin; 0: any pin.
  void Unpin(int32_t node, uint64_t id = 0);
  uint64_t pin(int32_t node) const { return At(node).pin; }  // 0: no pin
  int64_t pinned_groups() const { return pinned_groups_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }
  int64_t pinned_bytes(TenantKey tenant) const;
  // Returns the idle group that is evicted next; passes over groups with priority. REQUIRES: there
  // is one.
  uint32_t OldestIdle(LayoutId layout);

  // --- Rows in slower tiers
  // From this call on, an idle group with a copy outside is demoted when its room is needed,
  // instead of evicted. `outside` must outlive the cache.
  void set_outside(CopiesOutside* outside) { outside_ = outside; }
  About about(int32_t node) const;
  // Returns true if the rows of a demoted node are being restored.
  bool Comes(int32_t node) const { return outside_ != nullptr && outside_->Comes(node); }
  void CountUse(int32_t node) { ++At(node).uses; }
  // Returns the idle group of a node to the pool; the node keeps its copy outside.
  void Demote(int32_t node);
  // Gives the demoted node its rows back, in `entry`; the cache takes over the one reference to it.
  void Restore(int32_t node, uint32_t entry, Tier from);
  // Removes a node whose rows are gone. Either its group was evicted, or it was demoted and has
  // lost its last copy, which was damaged or whose room was needed.
  void Lose(int32_t node, EventKind why, Tier tier);
  // Tells the directory that the copies of a demoted node have moved to other tiers.
  void NoteCopies(int32_t node) {
    if (At(node).entry == SlabPool::kNoEntry) List(node);
  }
  // Logs an event of the node.
  void Note(int32_t node, EventKind kind, Tier tier);

  // Forgets all groups of the layout, and looks at no others.
  void Drop(LayoutId layout);

  const PrefixStats& stats() const { return stats_; }
  // Directory of the whole pages; any thread may read it during the cache's life.
  const PageDirectory& directory() const { return directory_; }
  // Adds the cache's own references to the counts by entry.
  void AddReferences(std::unordered_map<uint32_t, int32_t>* references) const;
  // Returns a description of the fault, or empty if all accounts agree.
  std::string CheckInvariants() const;

 private:
  // Keys of evicted pages that are remembered, to tell kEvicted from kAbsent.
  static constexpr size_t kEvictedKept = 1 << 14;

  struct Node {
    LayoutId layout = kNone;  // kNone: not in use
    uint32_t entry = SlabPool::kNoEntry;
    PrefixKey key, parent;  // key: if it is a whole page
    TenantKey tenant = 0;
    bool whole = false;
    int32_t rows = 0;
    int32_t uses = 0;
    int32_t priority = 0;
    uint64_t pin = 0;
    std::vector<uint32_t> tokens;  // of its rows; empty if page keys named them
    // Links of the nodes with tokens and the same parent; the free list uses next.
    int32_t prev = kNone, next = kNone;
  };

  Node& At(int32_t node) { return nodes_[static_cast<size_t>(node)]; }
  const Node& At(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  // Returns false if a sibling in the pool makes the node unnecessary. Sets `*same` to a demoted
  // sibling with the same rows, if there is one.
  bool ReplaceContainedSibling(LayoutId layout, const PrefixKey& parent,
                               std::span<const uint32_t> tokens, int32_t* same);
  // Gives a demoted node the group in which its rows were computed again.
  bool PublishAgain(int32_t node, uint32_t entry);
  // Tells the directory where the rows of a whole page are.
  void List(int32_t node);
  void Link(int32_t node);
  void Remove(int32_t node);
  void Evict(uint32_t entry);
  void ReturnGroup(Node* node);
  void CountPinned(const Node& node, int32_t change);
  void EvictOldest(LayoutId layout, int64_t groups);
  bool DropSlabs(LayoutId layout, int64_t groups, bool own_only);
  bool EvictOfOwner(LayoutId layout, int64_t bytes);

  SlabPool* const pool_;
  PageWorkQueue* const work_;
  EventLog* events_ = nullptr;
  CopiesOutside* outside_ = nullptr;
  std::vector<Node> nodes_;
  std::vector<int64_t> of_layout_;  // nodes
  int32_t free_ = kNone;
  absl::flat_hash_map<PrefixKey, int32_t> whole_;      // by key
  PageDirectory directory_;                            // of the same nodes, for other threads
  absl::flat_hash_map<PrefixKey, int32_t> families_;   // first of the nodes with this parent
  absl::flat_hash_map<TenantKey, int64_t> pinned_of_;  // bytes
  int64_t pinned_groups_ = 0, pinned_bytes_ = 0;
  uint64_t next_pin_ = 1;
  // Low halves of keys; each lies at the place that it gives itself.
  std::vector<uint64_t> evicted_;
  PrefixStats stats_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CACHE_H_
