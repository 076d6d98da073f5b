// The prefix cache: committed page groups that can be found by what their rows stand for.
//
// A published group has a node, and the cache holds one reference to it. Nodes of whole pages are
// found by key; nodes with tokens also by the rows in which they agree, among those that follow the
// same parent. A group that the cache alone holds is idle: it stays until its room is needed, the
// least recently used of its layout first (slab_pool.h). A sequence that ends gives its pages back
// from the last to the first, so the ends of long prefixes go before their beginnings.
//
// A published group is never written again: writers see more than one reference and copy. So what
// Find returns cannot be stale, and a caller that shares the group keeps it.
//
// Where rows have copies in slower tiers (CopiesOutside), a node may outlive its group: it is
// demoted, and found without one, until the rows are back.
//
// Costs: Find and Publish look at one key and at most kMostSiblings nodes, evictions are O(1);
// MakeRoom looks through the slabs where a layout's own idle groups do not suffice. Memory: a node
// for each group of the pool and of the slower tiers at most, with 4 bytes a row.
// Threading: owned by the KvCache that holds it.
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
  int32_t rows = 0;  // that were added to the sequence
  MatchEnd end = MatchEnd::kNotAsked;
};

struct PrefixStats {
  std::array<uint64_t, kMatchEnds> ends = {};  // matches by where they ended
  uint64_t hits = 0;                           // matches that found rows
  uint64_t rows_asked = 0, rows_found = 0;
  uint64_t published = 0;   // groups
  uint64_t superseded = 0;  // nodes whose rows a longer one has
  uint64_t evicted = 0;     // groups whose room was needed, in the pool or in the last tier
  uint64_t demoted = 0;     // groups that left the pool, their rows in a slower tier
  uint64_t restored = 0;    // and came back
  uint64_t freed = 0;       // groups that came back to the pool, for any reason
  int64_t nodes = 0;
  uint64_t steps = 0;  // keys and nodes looked at, to show what an operation costs
};

// What slower tiers have of nodes, by their index.
class CopiesOutside {
 public:
  virtual ~CopiesOutside() = default;
  virtual bool Has(int32_t node) const = 0;
  // Whether its rows are on their way back, or wait for it.
  virtual bool Comes(int32_t node) const = 0;
  // The fastest of the tiers that have its rows. REQUIRES: Has.
  virtual Tier Fastest(int32_t node) const = 0;
  // The node is no more: its index may come back for another one.
  virtual void Forget(int32_t node) = 0;
};

class PrefixCache final {
 public:
  static constexpr int32_t kNone = -1;
  // Nodes with the same parent that a look by rows compares, the latest first.
  static constexpr int32_t kMostSiblings = 32;

  struct Found {
    uint32_t entry = SlabPool::kNoEntry;  // kNoEntry with rows: the node is demoted
    int32_t rows = 0;
    int32_t node = kNone;
  };
  // Of a node.
  struct About {
    LayoutId layout = -1;
    uint32_t entry = SlabPool::kNoEntry;  // kNoEntry: demoted
    TenantKey tenant = 0;
    int32_t uses = 0;  // matches that took its rows
    bool demoted() const { return entry == SlabPool::kNoEntry; }
  };

  PrefixCache(SlabPool* pool, PageWorkQueue* work);

  // The group of the chain's whole page, or none.
  Found Find(LayoutId layout, const PrefixChain& chain, int32_t page);
  // The group whose rows agree longest with the page's first `rows` rows, at least one. With
  // `in_pool`, demoted ones are passed over.
  Found FindRows(LayoutId layout, const PrefixChain& chain, int32_t page, int32_t rows,
                 bool in_pool = false);
  // Why Find found nothing.
  MatchEnd WhyAbsent(LayoutId layout, const PrefixChain& chain, int32_t page) const;
  void CountMatch(MatchEnd end, int32_t asked, int32_t found);

  // The group holds the page's first `rows` rows, committed at every layer. False, and nothing
  // happens, when it is cached already or still to be filled, or when other groups of the pool have
  // the same rows. REQUIRES: rows = page_size, or fewer of a chain with tokens.
  bool Publish(LayoutId layout, const PrefixChain& chain, int32_t page, int32_t rows,
               uint32_t entry);
  // Evictions are events of the log from now on; null: of none. It outlives the cache.
  void set_events(EventLog* events) { events_ = events; }
  // Evicts idle groups so that `groups` more can be taken for the layout, which Take has just
  // refused for `why`. Counts first: false, and nothing is evicted, when that would not suffice.
  // Groups of the layout itself go first, then whole slabs of others.
  bool MakeRoom(LayoutId layout, int64_t groups, TakeRefusal why);

  // --- Hints
  static constexpr int32_t kMostPriority = 3;
  // Groups that are passed over at most to find the one that goes.
  static constexpr int32_t kMostPassedOver = 16;
  // The node's group is passed over so many times before it goes.
  void SetPriority(int32_t node, int32_t priority) { At(node).priority = priority; }
  // The group stays in the pool until Unpin. Returns the pin's id, another one each time. REQUIRES:
  // not demoted.
  uint64_t Pin(int32_t node);
  // Nothing happens unless the node has this pin; 0: any.
  void Unpin(int32_t node, uint64_t id = 0);
  uint64_t pin(int32_t node) const { return At(node).pin; }  // 0: none
  int64_t pinned_groups() const { return pinned_groups_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }
  int64_t pinned_bytes(TenantKey tenant) const;
  // The idle group that goes next; passes over those of priority. REQUIRES: there is one.
  uint32_t OldestIdle(LayoutId layout);

  // --- Rows in slower tiers
  // Idle groups of which there are copies are demoted from now on where they were evicted. Outlives
  // the cache.
  void set_outside(CopiesOutside* outside) { outside_ = outside; }
  About about(int32_t node) const;
  // Whether the rows of a demoted node are on their way back.
  bool Comes(int32_t node) const { return outside_ != nullptr && outside_->Comes(node); }
  void CountUse(int32_t node) { ++At(node).uses; }
  // The idle group of a node that has a copy outside goes back to the pool.
  void Demote(int32_t node);
  // The rows of a demoted node are in `entry`, whose one reference becomes the cache's.
  void Restore(int32_t node, uint32_t entry, Tier from);
  // A demoted node whose last copy is gone: its room was needed, or it was damaged.
  void Lose(int32_t node, EventKind why, Tier tier);
  // The copies of a demoted node are in other tiers than before.
  void NoteCopies(int32_t node) {
    if (At(node).entry == SlabPool::kNoEntry) List(node);
  }
  // Something of the node is to be told.
  void Note(int32_t node, EventKind kind, Tier tier);

  // Forgets all groups of the layout; those of others are not looked at.
  void Drop(LayoutId layout);

  const PrefixStats& stats() const { return stats_; }
  // Of the whole pages; for any thread, while the cache is there.
  const PageDirectory& directory() const { return directory_; }
  // Adds the cache's references, by entry.
  void AddReferences(std::unordered_map<uint32_t, int32_t>* references) const;
  // Empty when right.
  std::string CheckInvariants() const;

 private:
  static constexpr size_t kEvictedKept = 1 << 14;  // keys, to tell kEvicted from kAbsent

  struct Node {
    LayoutId layout = kNone;  // kNone: not in use
    uint32_t entry = SlabPool::kNoEntry;
    PrefixKey key, parent;  // key: of a whole page
    TenantKey tenant = 0;
    bool whole = false;
    int32_t rows = 0;
    int32_t uses = 0;
    int32_t priority = 0;
    uint64_t pin = 0;
    std::vector<uint32_t> tokens;        // of its rows; empty if they were named by a key
    int32_t prev = kNone, next = kNone;  // nodes with tokens and the same parent; next of free ones
  };

  Node& At(int32_t node) { return nodes_[static_cast<size_t>(node)]; }
  const Node& At(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  // False when a sibling in the pool makes the node needless. `*same` becomes a demoted one of the
  // same rows, if there is one.
  bool ReplaceContainedSibling(LayoutId layout, const PrefixKey& parent,
                               std::span<const uint32_t> tokens, int32_t* same);
  // The rows of a demoted node were computed once more.
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
  PageDirectory directory_;                            // of the same, for other threads
  absl::flat_hash_map<PrefixKey, int32_t> families_;   // first of the nodes with a parent
  absl::flat_hash_map<TenantKey, int64_t> pinned_of_;  // bytes
  int64_t pinned_groups_ = 0, pinned_bytes_ = 0;
  uint64_t next_pin_ = 1;
  std::vector<uint64_t> evicted_;  // low halves of keys, by themselves
  PrefixStats stats_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_PREFIX_CACHE_H_
