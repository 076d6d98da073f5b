// The accounts of the KV pool: which page belongs to which sequence. The bytes belong to the
// backend; this class deals only in offsets.
//
// One byte budget is cut into slabs. A slab serves page groups of one layout at a time and returns
// to the budget when its last group is free. A sequence is a list of page groups plus a length.
// Fork shares groups. A sequence that writes into a shared group gets a copy (copy-on-write); each
// layer's page is copied with the first row written to it. A group that last belonged to another
// tenant is zeroed before rows are written; pool memory that was never handed out counts as clean.
// Copies and zeroing are device work; a PageWorkQueue keeps account of them until launches have
// carried them.
//
// Conservation invariant: free + used groups of a slab equal its groups; every used group's
// reference count equals the number of tables that hold it, plus one if it is cached; slab bytes
// sum to the budget. The sums are checked after every mutation, in every build, and end the process
// when they are wrong; CheckInvariants checks all of it.
//
// A sequence may say what its rows stand for (Declare). Its whole pages are then published as they
// are committed, and the committed part of its last page when it ends. Match lets another sequence
// of the layout share them. Groups that the prefix cache alone holds are idle: they yield when
// Reserve needs their room.
//
// A sequence of a model with a window has two lists of page groups: one of compressed entries, and
// one of the window's rows. Both belong to one slot: every call changes both, or neither. In page
// tables and in max_sequences such a sequence takes the room of two.
//
// A sequence may be changed only while no running launch reads it, because backends with unified
// memory read the page tables in place. Fork only reads its parent. Every slot passed in must be
// open. A slot that is not, or a commit of more rows than were reserved, ends the process.
//
// Threading: owned by the engine role. No call waits. A call that returns an error has changed
// nothing. After AddLayout only error messages allocate, except that the work queue, LaunchWork and
// the prefix cache grow until they have reached their largest size.
#ifndef MLA_SCHEDULER_KVCACHE_KV_CACHE_H_
#define MLA_SCHEDULER_KVCACHE_KV_CACHE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/pool/cache_layout.h"
#include "scheduler/kvcache/pool/page_work.h"
#include "scheduler/kvcache/pool/require.h"
#include "scheduler/kvcache/pool/slab_pool.h"
#include "scheduler/kvcache/prefix/prefix_cache.h"

namespace mla::kvcache {

using SeqSlot = int32_t;  // handle of an open sequence, reused after Release

// The lists of page groups that a sequence may have.
enum class PageList : uint8_t {
  kMain,    // of its rows; of its compressed entries if it has a window
  kWindow,  // of the window's rows
};

struct KvCacheOptions {
  int64_t bytes = 0;       // pool budget, at most 2^32 granules of 256 bytes (1 TiB)
  int64_t slab_bytes = 0;  // 0: chosen from the budget, but at least one group
  int32_t max_sequences = 0;
  int32_t max_pages_per_sequence = 0;  // page-table entries of a sequence
};

struct StepRows {  // rows that one sequence adds in a step
  SeqSlot sequence = -1;
  int32_t rows = 0;
};

// Says why page groups came back to the pool.
enum class Freed : uint8_t {
  kReleased,     // their sequence was released
  kExpired,      // the lease of their sequence ran out
  kTruncated,    // rows were dropped
  kUncommitted,  // a step was aborted, or kept fewer rows than it had reserved
  kEvicted,      // the prefix cache held it alone and gave it up
};
inline constexpr size_t kFreedReasons = 5;

// The groups into which the last pages of a sequence are copied, by PageList; kNoEntry: no copy.
struct CopiedGroups {
  std::array<uint32_t, 2> by_list = {SlabPool::kNoEntry, SlabPool::kNoEntry};
  friend bool operator==(const CopiedGroups&, const CopiedGroups&) = default;
};

// The page groups that a sequence needs for more rows.
struct PageNeed {
  int64_t groups = 0;
  int64_t bytes = 0;
};

struct KvCacheStats {
  int64_t bytes_total = 0;
  int64_t bytes_used = 0;  // bytes of groups in use
  int64_t groups_used = 0;
  int64_t groups_free = 0;  // free groups in slabs that are assigned to a layout
  int64_t slabs_free = 0;
  int64_t groups_shared = 0;  // held by more than one reference; the prefix cache's count
  // Neither used nor free: groups given back and kept until page work on them is done, and groups
  // taken for rows that come back from slower tiers.
  int64_t groups_pinned = 0;
  int64_t bytes_pinned = 0;
  int64_t sequences = 0;
  // Only the prefix cache holds these groups; they count neither as used nor as free.
  int64_t groups_cached = 0;
  int64_t bytes_cached = 0;
  uint64_t allocations = 0;  // since start; allocations - all freed = groups_used + groups_cached
  std::array<uint64_t, kFreedReasons> freed = {};
  uint64_t copies_on_write = 0;  // page groups of which at least one layer was copied
  uint64_t bytes_copied = 0;     // for them
  uint64_t scrubs = 0;
};

class KvCache final {
 public:
  // `page_tables` is backend memory of at least max_sequences x max_pages_per_sequence entries,
  // which only the cache writes. INVALID_ARGUMENT names the bad option.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const KvCacheOptions& options,
                                                         std::span<uint32_t> page_tables);
  ~KvCache();

  // Adds a layout of page groups. RESOURCE_EXHAUSTED when one group does not fit the budget,
  // INVALID_ARGUMENT for dims below 1. Allocates, so do not call it in the steady state. `account`:
  // see SlabPool::AddLayout.
  absl::StatusOr<LayoutId> AddLayout(const GroupLayout& layout, PoolAccount* account = nullptr);
  // Forgets the layout. FAILED_PRECONDITION while sequences use it.
  absl::Status RemoveLayout(LayoutId layout);

  // Stands for the layout of a sequence without a window.
  static constexpr LayoutId kNoWindow = -1;
  // Opens a sequence without rows; takes no pages. With a window, `window` is the layout of its
  // rows and `layout` that of the compressed entries. RESOURCE_EXHAUSTED when max_sequences are
  // open already.
  absl::StatusOr<SeqSlot> Open(LayoutId layout, TenantKey tenant, LayoutId window = kNoWindow);
  // Opens a sequence of the same tenant that shares the parent's first `length` rows (<= its
  // committed length). INVALID_ARGUMENT below least_length, as for Truncate.
  absl::StatusOr<SeqSlot> Fork(SeqSlot parent, int32_t length);
  // For a sequence without rows, with a window: sets the length of the window's list to this many
  // whole pages, as if the window had passed their rows. The next Reserve and Commit bring both
  // lists to the same length. REQUIRES: no reservation.
  void SkipPages(SeqSlot sequence, int32_t pages);
  // Drops the rows from `length` on. Returns to the pool the page groups that hold none of the
  // remaining rows.
  absl::Status Truncate(SeqSlot sequence, int32_t length);
  // Ends an open reservation, too. The next Open may return the same slot.
  void Release(SeqSlot sequence, Freed why = Freed::kReleased);

  // Reserves pages for all rows of a step or for none (RESOURCE_EXHAUSTED with pages wanted and
  // free). Queues the zeroing that the pages need in work(): rows may be written and read once the
  // work up to work().last(), as it is after this call, has been carried. Rows of a layer must also
  // wait for that layer's copy into copied_group(). A sequence with a reservation refuses another
  // one, Fork and Truncate (FAILED_PRECONDITION).
  absl::Status Reserve(std::span<const StepRows> rows);
  // Returns the group that replaces the sequence's last page during a reservation, for
  // work().TakeLayer. SlabPool::kNoEntry if no other sequence shares that page.
  uint32_t copied_group(SeqSlot sequence, PageList list = PageList::kMain) const;
  CopiedGroups copied_groups(SeqSlot sequence) const;  // of all its lists
  // Returns the groups that Reserve would take for `rows` more rows, without copies of shared ones.
  PageNeed NeedOf(SeqSlot sequence, int32_t rows) const;
  // --- Prefixes Declares that the sequence's first `rows` rows, committed or still to come, are
  // the rows of the chain. Replaces an earlier declaration. Publishes the whole pages that are
  // committed. REQUIRES: chain of the layout's page size, not null; rows within 0..chain->rows().
  void Declare(SeqSlot sequence, std::shared_ptr<const PrefixChain> chain, int32_t rows);
  // Takes the declaration of the rows from `from` on back.
  void Undeclare(SeqSlot sequence, int32_t from);
  // Appends cached rows to the committed ones as far as they are declared and found, up to
  // `most_rows` rows in total. Does nothing if the sequence ends inside a page. REQUIRES: no
  // reservation.
  PrefixMatch Match(SeqSlot sequence, int32_t most_rows);
  // Returns the chain of the declaration, or null if nothing is declared.
  const std::shared_ptr<const PrefixChain>& chain(SeqSlot sequence) const;
  int32_t declared(SeqSlot sequence) const;
  // Forgets the layout's cached rows, because their contents are no longer valid.
  void DropCached(LayoutId layout);
  const PrefixStats& prefix_stats() const { return prefixes_.stats(); }
  // Makes the cache write events of cached rows to the log from now on, or none if it is null. The
  // log outlives the cache.
  void set_events(EventLog* events) {
    events_ = events;
    prefixes_.set_events(events);
  }
  EventLog* events() const { return events_; }
  // Sets the names of the sequence and of its model for events, because several models may share a
  // layout.
  void SetName(SeqSlot sequence, uint64_t name, std::shared_ptr<const std::string> model) {
    Sequence& named = Mutable(sequence);
    named.name = name;
    named.model = std::move(model);
  }
  // Logs an event of the whole sequence.
  void Note(SeqSlot sequence, EventKind kind);
  // --- Groups that leave for slower tiers and come back
  PrefixCache& prefixes() { return prefixes_; }
  const PrefixCache& prefixes() const { return prefixes_; }
  const SlabPool& pool() const { return pool_; }
  // Makes an idle group the last of its layout to be evicted.
  void Touch(uint32_t entry) { pool_.Touch(entry); }
  // A group into which restored bytes are on their way.
  struct RestoreRoom {
    uint64_t id = 0;
    uint32_t entry = SlabPool::kNoEntry;
    LayoutId layout = -1;
  };
  // Takes a group that the tenant's restored bytes will fill completely; kNoEntry if the pool is
  // full even after evictions.
  RestoreRoom TakeToRestore(LayoutId layout, TenantKey tenant);
  // Call it when the bytes have come: gives the group to the demoted node.
  void Restore(int32_t node, uint64_t id, Tier from);
  // Gives up a restore that failed or is not needed any more. Does nothing if the layout is gone.
  void DropRestore(uint64_t id);
  // Returns the number of groups, slabs, keys and nodes visited since start; shows what an
  // operation costs.
  uint64_t steps() const { return pool_.steps() + prefixes_.stats().steps; }

  // Keeps the first `rows` reserved rows, returns the other pages and ends the reservation. If it
  // keeps none, a page that was copied on write is replaced by the shared one again. REQUIRES: if
  // rows are kept, launches have made the sequence's copies at every layer.
  void Commit(SeqSlot sequence, int32_t rows);
  void Rollback(SeqSlot sequence);

  PageWorkQueue& work() { return work_; }
  const PageWorkQueue& work() const { return work_; }
  // Adds the page-table entries of the sequence that have changed since a launch last published
  // them. From this call on they count as published.
  void TakeTableChanges(SeqSlot sequence, std::vector<kernels::TableRange>* changes) {
    Sequence& of = MutableSameVersion(sequence);
    const int32_t first = of.pages_published;
    of.pages_published = of.pages;
    if (of.pages > first) changes->push_back({TableBegin(sequence) + first, of.pages - first});
    if (of.window != kNone) TakeTableChanges(of.window, changes);
  }
  // Call it when a launch that published entries of the sequence has failed.
  void UnpublishTable(SeqSlot sequence);
  // As long as it stays the same no sequence has changed: rows have not moved, and the published
  // page tables are valid. Never 0.
  uint64_t version() const { return version_; }

  // See SlabPool::WatchLifetimes.
  void WatchLifetimes(std::function<int64_t()> now, std::function<void(int64_t)> on_freed) {
    pool_.WatchLifetimes(std::move(now), std::move(on_freed));
  }

  bool Has(SeqSlot sequence, PageList list) const {
    return list == PageList::kMain || Get(sequence).window != kNone;
  }
  // REQUIRES, of this and other calls that name a list: the sequence Has it.
  int32_t length(SeqSlot sequence, PageList list = PageList::kMain) const {  // committed rows
    return Get(ListOf(sequence, list)).length;
  }
  // Returns the number of rows of the open reservation; 0 if there is none.
  int32_t reserved(SeqSlot sequence, PageList list = PageList::kMain) const {
    return std::max(0, Get(ListOf(sequence, list)).rows_reserved);
  }
  bool has_reservation(SeqSlot sequence) const { return Get(sequence).rows_reserved != kNone; }
  // Returns the group that holds one page of the list. REQUIRES: the list has this page.
  uint32_t group(SeqSlot sequence, int64_t page, PageList list = PageList::kMain) const;
  // Keeps the group from being handed out again until UnpinGroup, even if it has no references,
  // because its bytes are on their way.
  void PinGroup(uint32_t entry) { pool_.Pin(entry); }
  void UnpinGroup(uint32_t entry) { pool_.Unpin(entry); }
  int64_t group_offset(uint32_t entry) const { return pool_.offset(entry); }
  // Returns the index in the page tables of the entry of its first row. With a window, entries of
  // kept rows are found relative to it too.
  int64_t page_table(SeqSlot sequence) const { return TableOrigin(WithWindow(sequence)); }
  // For a sequence with a window: returns the same for the page of its first compressed entry.
  int64_t compressed_table(SeqSlot sequence) const { return TableOrigin(sequence); }
  // Returns the least length that Fork and Truncate accept; above 0 once rows have left the window.
  int32_t least_length(SeqSlot sequence) const;
  int32_t max_rows(SeqSlot sequence) const;  // rows that its page table can address
  // Returns the number of page groups of this layout that could be allocated now.
  int64_t free_groups(LayoutId layout) const;
  int64_t idle_groups(LayoutId layout) const { return pool_.idle_groups(layout); }
  int64_t pinned_groups() const { return pool_.stats().groups_pinned; }
  KvCacheStats stats() const;
  // Returns KvCacheStats::bytes_used.
  int64_t bytes_used() const {
    const SlabPoolStats& pool = pool_.stats();
    return pool.bytes_used - pool.bytes_pinned - pool.bytes_cached - restoring_bytes_;
  }
  // Checks all accounts; returns an empty string if the conservation invariant holds, else a
  // description of the fault.
  std::string CheckInvariants() const;

 private:
  friend class KvCachePeer;  // tests break counters through it
  static constexpr int32_t kNone = -1;

  struct Sequence {           // one list of page groups
    LayoutId layout = kNone;  // kNone: not open
    SeqSlot window = kNone;   // the sequence's other list; kNone: no window, or this is that list
    TenantKey tenant = 0;
    int32_t length = 0;
    int32_t pages = 0;              // page-table entries in use
    int32_t pages_gone = 0;         // pages before them that the window has passed
    int32_t pages_published = 0;    // leading entries that a launch has published
    int32_t rows_reserved = kNone;  // kNone: no reservation
    int32_t pages_before = 0;       // the reservation
    uint32_t entry_before_copy = SlabPool::kNoEntry;  // entry of the page copied on write, if any
    bool copy_took_last = false;                      // reference to that page
    uint64_t name = 0;                                // in events
    std::shared_ptr<const std::string> model;         // in events
    // The number of the latest Reserve that named it, which tells whether one call names a sequence
    // twice.
    uint64_t reserve_call = 0;
    std::shared_ptr<const PrefixChain> chain;  // declared contents of its rows; null: not known
    // The number of leading rows whose contents the chain gives.
    int32_t declared = 0;
    int32_t pages_cached = 0;  // leading whole pages that were offered to the cache
    int32_t next_free = kNone;
  };

  KvCache(const KvCacheOptions& options, std::span<uint32_t> page_tables);
  RestoreRoom TakeRestoring(uint64_t id);
  const Sequence& Get(SeqSlot slot) const {
    Require(IsOpen(slot), "sequence slot is not open");
    return sequences_[static_cast<size_t>(slot)];
  }
  // Returns the sequence for a change that launches may see, and counts a new version.
  Sequence& Mutable(SeqSlot slot) {
    ++version_;
    return MutableSameVersion(slot);
  }
  // Returns the sequence for a change that no launch sees.
  Sequence& MutableSameVersion(SeqSlot slot) {
    Require(IsOpen(slot), "sequence slot is not open");
    return sequences_[static_cast<size_t>(slot)];
  }
  bool IsOpen(SeqSlot slot) const {
    return slot >= 0 && slot < options_.max_sequences &&
           sequences_[static_cast<size_t>(slot)].layout != kNone;
  }
  SeqSlot ListOf(SeqSlot slot, PageList list) const {
    return list == PageList::kMain ? slot : Get(slot).window;
  }
  // Returns the list from which rows leave once they are outside the window, if the sequence has
  // one.
  SeqSlot WithWindow(SeqSlot slot) const {
    const SeqSlot window = Get(slot).window;
    return window == kNone ? slot : window;
  }
  // Calls fn with each list of the sequence.
  template <typename Fn>
  void ForLists(SeqSlot slot, Fn&& fn) {
    const SeqSlot window = Get(slot).window;
    fn(slot);
    if (window != kNone) fn(window);
  }
  int64_t TableOrigin(SeqSlot slot) const { return TableBegin(slot) - Get(slot).pages_gone; }
  std::span<uint32_t> TableOf(SeqSlot slot);
  int64_t TableBegin(SeqSlot slot) const { return int64_t{slot} * options_.max_pages_per_sequence; }
  int32_t PagesFor(const Sequence& sequence, int64_t rows) const;
  void LeaveBehind(SeqSlot slot);
  absl::Status CheckSlots(int32_t wanted) const;
  SeqSlot TakeSlot(LayoutId layout, TenantKey tenant);
  SeqSlot ForkList(SeqSlot from, int32_t length);
  void ReleaseList(SeqSlot slot, Freed why);
  void CommitList(SeqSlot slot, int32_t rows);
  std::span<const StepRows> ByList(std::span<const StepRows> rows);
  absl::Status CheckReserve(std::span<const StepRows> rows);
  absl::Status TryReserve(std::span<const StepRows> rows);
  bool MakeRoom(std::span<const StepRows> rows);
  // Offers the first `rows` rows of the page to the prefix cache.
  void Publish(SeqSlot slot, int32_t page, int32_t rows);
  void PublishPages(SeqSlot slot);
  void PublishRest(SeqSlot slot);
  bool ReserveOne(SeqSlot slot, int32_t rows);
  bool CopySharedPage(SeqSlot slot);
  void EndCopy(SeqSlot slot, bool keep);
  void UndoReserve(SeqSlot slot);
  absl::Status Exhausted(std::span<const StepRows> rows, const StepRows& at) const;
  void CountReserved(SeqSlot slot);
  bool DropGroup(uint32_t entry);
  void ShrinkTo(SeqSlot slot, int32_t pages, Freed why);
  void CheckAfterMutation() const;
  std::string CheckWindow(SeqSlot slot) const;

  const KvCacheOptions options_;
  const std::span<uint32_t> tables_;
  SlabPool pool_;
  PageWorkQueue work_{&pool_};
  PrefixCache prefixes_{&pool_, &work_};
  EventLog* events_ = nullptr;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> layout_sequences_;  // open sequences by layout
  std::vector<StepRows> list_rows_;        // scratch of Reserve
  SeqSlot free_slot_ = kNone;
  uint64_t version_ = 1;
  uint64_t reserve_calls_ = 0;
  int64_t open_sequences_ = 0;
  uint64_t allocations_ = 0;
  uint64_t scrubs_ = 0;
  std::vector<RestoreRoom> restoring_;
  uint64_t next_restore_ = 1;
  int64_t restoring_bytes_ = 0;
  std::array<uint64_t, kFreedReasons> freed_ = {};
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_KV_CACHE_H_
