// Hands out page groups from one budget of bytes.
//
// The budget is cut into slabs of equal size (the last may be shorter) when the first layout comes.
// A slab serves groups of one layout at a time and returns to the budget when its last group is
// free. Groups larger than a slab lie one after the other in runs of neighbouring slabs, which are
// taken and returned whole. A run has the number of slabs that wastes little, or fewer if not
// enough free slabs are neighbours. A group is named by its page table entry: the offset of its
// first byte in granules of kPageGranuleBytes.
//
// Each range of bytes has a mark: clean (never handed out), the key of a tenant, or mixed. A group
// is dirty for a tenant when its mark is neither clean nor that tenant's. When a slab changes its
// layout, the new groups take over the marks of their bytes. A group over ranges with different
// marks becomes mixed.
//
// Misuse, such as an entry that names no group or a group freed twice, ends the process in every
// build (require.h).
//
// Take, Untake, Share and Drop are O(1), with one exception: a layout that needs more slabs
// searches all slabs for free ones. If such a slab had another group size before, the marks of its
// former groups are merged. Nothing allocates after AddLayout, except for accounts that grow when
// first needed. Threading: owned by the KvCache that holds it.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_SLAB_POOL_H_
#define MLA_SCHEDULER_KVCACHE_POOL_SLAB_POOL_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/kvcache/pool/cache_layout.h"

namespace mla::kvcache {

using LayoutId = int32_t;  // index of a registered layout, reused after removal
// The engine gives one to each tenant; keys are never reused, and are below kMaxTenantKey.
using TenantKey = uint64_t;

inline constexpr TenantKey kMaxTenantKey = 0xfffffffffffffff0u;

// Counts the pool memory that a layout takes, and may refuse a take. Called from the pool's thread;
// may not call back.
class PoolAccount {
 public:
  virtual ~PoolAccount() = default;
  // Both return false if the layout gets no further group or slab. `bytes`: of one group, or of one
  // run of slabs.
  virtual bool TakeGroup(int64_t bytes) = 0;
  virtual bool TakeSlab(int64_t bytes) = 0;
  virtual void ReturnGroup(int64_t bytes) = 0;
  virtual void ReturnSlab(int64_t bytes) = 0;
  // Returns the number of bytes of groups that the owner may still take under its own bound;
  // negative beyond it.
  virtual int64_t GroupRoom() const = 0;
  // Returns the bound of the account in bytes.
  virtual int64_t GroupBound() const { return std::numeric_limits<int64_t>::max(); }
  // Layouts with the same owner share its bounds; null: no owner.
  virtual const void* owner() const { return nullptr; }
};

// Says why Take gave no group.
enum class TakeRefusal : uint8_t { kNoRoom, kGroupBound, kSlabBound };

struct SlabPoolStats {
  int64_t bytes_total = 0;
  int64_t bytes_used = 0;
  int64_t groups_used = 0;
  int64_t groups_free = 0;  // in slabs that are assigned to a layout
  int64_t groups_shared = 0;
  // These groups have no references and are kept only because page work uses them; they are part of
  // groups_used and bytes_used.
  int64_t groups_pinned = 0;
  int64_t bytes_pinned = 0;
  // Only the prefix cache holds these groups; they are part of groups_used and bytes_used.
  // groups_idle: the part of these groups that page work does not use.
  int64_t groups_cached = 0;
  int64_t bytes_cached = 0;
  int64_t groups_idle = 0;
  int64_t slabs_free = 0;
};

class SlabPool final {
 public:
  static constexpr uint32_t kNoEntry = 0xffffffffu;
  // The pool keeps records of at most this number of groups. A client chooses the layout: with
  // pages of a few bytes the books would take as much memory as the rows.
  static constexpr int64_t kMostGroups = 1 << 20;
  // For groups larger than a slab: the most slabs of a run, unless one group needs more, and the
  // part of a run that may be wasted. The shortest run that wastes no more is taken.
  static constexpr int32_t kMostRunSlabs = 8;
  static constexpr int64_t kRunWaste = 8;  // an eighth
  // One in this many freed groups reports how long it was held.
  static constexpr uint64_t kLifetimeSample = 16;

  struct Taken {
    uint32_t entry = kNoEntry;
    bool dirty = false;  // true: may hold bytes of another tenant
  };

  // When memory for the books is taken: by AddLayout for all groups that the layout may get, or by
  // Take when it hands out a group for the first time.
  enum class Books : uint8_t { kAtOnce, kAsNeeded };

  // With slab_bytes 0 a slab is about a thirty-second of the budget, rounded to whole groups of the
  // first layout. A slab always holds at least one of these groups.
  SlabPool(int64_t bytes, int64_t slab_bytes, Books books = Books::kAtOnce);

  // For every kLifetimeSample-th freed group, calls `on_freed` with the nanoseconds, measured by
  // `now`, between its Take and its last Drop. Neither function may call back or allocate.
  void WatchLifetimes(std::function<int64_t()> now, std::function<void(int64_t)> on_freed);
  // Adds a layout of groups. RESOURCE_EXHAUSTED if not even one group fits the budget. REQUIRES:
  // all dimensions are positive. `account`, if not null, is told of every group and slab that the
  // layout takes and returns; it must outlive the layout.
  absl::StatusOr<LayoutId> AddLayout(const GroupLayout& layout, PoolAccount* account = nullptr);
  // REQUIRES: none of its groups has a reference. Groups that are pinned by page work keep their
  // slabs until they are unpinned.
  void RemoveLayout(LayoutId layout);
  bool Has(LayoutId layout) const;
  const GroupLayout& layout(LayoutId layout) const { return Of(layout).layout; }
  bool rows_lead(LayoutId layout) const { return Of(layout).rows_lead; }  // see RowsLead

  // Returns a group with one reference, marked as the tenant's; kNoEntry if the pool is full or the
  // layout's account refuses.
  Taken Take(LayoutId layout, TenantKey tenant);
  // Undoes a Take whose group was not used, and restores the group's former mark. Several Takes
  // must be undone in reverse order.
  void Untake(uint32_t entry);
  void Share(uint32_t entry);  // one more reference
  // Removes one reference. Returns true if it was the last; the group is then free as soon as
  // nothing pins it.
  bool Drop(uint32_t entry);
  int32_t references(uint32_t entry) const;

  // --- Page work (page_work.h). A pinned group is not handed out again.
  void Pin(uint32_t entry);
  void Unpin(uint32_t entry);
  int32_t pins(uint32_t entry) const { return GroupOf(entry).pins; }
  // As Pin, for the source of a copy: its first `rows` rows may not be written until UnpinSource.
  void PinSource(uint32_t entry, int32_t rows);
  void UnpinSource(uint32_t entry);
  // Returns the number of rows of each of the group's pages that waiting or running copies still
  // have to read.
  int32_t pinned_rows(uint32_t entry) const;
  // Returns the piece of page work that fills the group, or -1.
  int32_t work(uint32_t entry) const;
  void set_work(uint32_t entry, int32_t piece) { GroupOf(entry).work = piece; }
  // Restores the mark that the group had before the latest Take.
  void RestoreMark(uint32_t entry);
  // Notes that the group may hold bytes of any tenant.
  void MarkMixed(uint32_t entry) { GroupOf(entry).mark = kMixed; }
  // Returns the tenant that took the group last. REQUIRES: the group is in use.
  TenantKey tenant(uint32_t entry) const { return GroupOf(entry).mark; }
  int64_t offset(uint32_t entry) const { return int64_t{entry} * kernels::kPageGranuleBytes; }
  int64_t group_bytes(LayoutId layout) const { return Of(layout).group_bytes; }

  // Returns the number of groups of this layout that Take could return now.
  int64_t free_groups(LayoutId layout) const {
    return free_in_slabs(layout) + CountRuns(Of(layout), nullptr);
  }
  int64_t free_in_slabs(LayoutId layout) const {  // part of it that needs no further slab
    return Of(layout).groups_total - Of(layout).groups_used;
  }
  // Returns the bytes of the groups that Take could return now, by a look at the last slab alone.
  // For groups larger than a slab the result may be too large: free slabs count as neighbours.
  int64_t BytesLeft(LayoutId layout) const;
  // Returns the reason why the latest failing Take failed.
  TakeRefusal refusal() const { return refusal_; }

  // --- Groups that the prefix cache holds: it has one of their references. A cached group is idle
  // while it has no other reference and no page work uses it. Idle groups of a layout are ordered
  // by the time when they became idle.
  void Cache(uint32_t entry, int32_t node);  // `node`: the cache's number for it, >= 0
  bool Uncache(uint32_t entry);              // as Drop
  int32_t cached(uint32_t entry) const { return GroupOf(entry).cached; }  // its node, or -1
  uint32_t oldest_idle(LayoutId layout) const { return Of(layout).idle_first; }
  bool idle(uint32_t entry) const { return GroupOf(entry).idle; }
  int64_t idle_groups(LayoutId layout) const { return Of(layout).groups_idle; }
  // Returns true if the accounts of two layouts have one owner.
  bool SameOwner(LayoutId a, LayoutId b) const;
  int64_t layouts() const { return static_cast<int64_t>(layouts_.size()); }
  int64_t GroupRoom(LayoutId layout) const;   // of its account, in bytes
  int64_t GroupBound(LayoutId layout) const;  // of its account, in bytes
  // Makes an idle group the youngest of its layout's idle groups.
  void Touch(uint32_t entry);
  // Returns what free_groups would be if the layout's idle groups were free, and all slabs that
  // hold only idle groups. Such slabs may belong to any layout, or with `own_only` to layouts of
  // the same owner.
  int64_t FreeWithoutIdle(LayoutId layout, bool own_only) const;
  // Returns the entries of all groups of a slab or run that holds only idle groups; empty if there
  // is none.
  std::vector<uint32_t> IdleSlab(LayoutId layout, bool own_only) const;
  const SlabPoolStats& stats() const { return stats_; }
  // Returns the number of groups and slabs visited since start; shows what an operation costs.
  uint64_t steps() const { return steps_; }

  // Compares all accounts with the reference counts of the page tables, given by entry. Returns a
  // description of the fault; empty if there is none.
  std::string CheckInvariants(const std::unordered_map<uint32_t, int32_t>& references) const;
  // Returns true if the sums of counters agree: the cheap part of CheckInvariants, a few additions
  // for each layout, run after every mutation.
  bool CountersHold() const;

 private:
  friend class SlabPoolPeer;  // tests break counters through it
  using Mark = TenantKey;     // or kClean or kMixed
  static constexpr Mark kClean = 0xfffffffffffffffeu;
  static constexpr Mark kMixed = 0xffffffffffffffffu;
  static constexpr int32_t kNone = -1;

  struct alignas(64) Group {  // one cache line of the processor
    int32_t references = 0;
    int32_t next_free = kNone;
    Mark mark = kClean;
    Mark mark_before = kClean;  // before the latest Take
    int32_t work = kNone;
    int32_t pins = 0;
    int32_t sources = 0;      // pins of copies from it
    int32_t pinned_rows = 0;  // 0 without such copies
    int64_t taken_ns = 0;     // kUntaken: its Take is being undone
    int32_t cached = kNone;   // the cache's node
    bool alone = false;       // only the cache holds it
    bool idle = false;        // alone, and no page work uses it
    uint32_t idle_prev = kNoEntry, idle_next = kNoEntry;
  };
  static constexpr int64_t kUntaken = -1;

  struct Slab {
    LayoutId layout = kNone;   // kNone: free
    int32_t head = kNone;      // first slab of its run; itself if it is alone
    int32_t span = 1;          // slabs of the run; valid in its first slab
    int32_t groups_total = 0;  // groups that the slab holds under its layout
    int32_t groups_used = 0;
    int32_t groups_idle = 0;  // idle ones among groups_used
    // Groups from this index on were not handed out since the slab got its layout.
    int32_t groups_fresh = 0;
    int32_t free_head = kNone;  // list of the freed ones
    int32_t prev = kNone;       // links of the list of the layout's slabs that have free groups
    int32_t next = kNone;
    int64_t mark_bytes = 0;   // size of the ranges that the marks in `groups` describe
    int32_t marked = 0;       // number of leading ranges that have marks of their own
    Mark rest_mark = kClean;  // of the bytes after the groups
    std::vector<Group> groups;
  };

  struct Layout {
    GroupLayout layout;
    bool rows_lead = false;
    bool active = false;
    PoolAccount* account = nullptr;
    int64_t group_bytes = 0;
    int32_t run_slabs = 1;     // length of its runs if there is room
    int64_t groups_total = 0;  // in its slabs
    int64_t groups_used = 0;
    int64_t groups_pinned = 0;
    int64_t groups_idle = 0;
    int32_t open_head = kNone;  // slabs with free groups
    uint32_t idle_first = kNoEntry, idle_last = kNoEntry;
  };

  struct Run {
    int32_t slabs = 0;  // 0: no run
    int32_t groups = 0;
  };

  struct Place {
    int32_t slab;
    int32_t group;
  };

  static Mark Merge(Mark a, Mark b);
  const Layout& Of(LayoutId layout) const { return layouts_[static_cast<size_t>(layout)]; }
  Layout& Of(LayoutId layout) { return layouts_[static_cast<size_t>(layout)]; }
  Slab& At(int32_t slab) { return slabs_[static_cast<size_t>(slab)]; }
  const Slab& At(int32_t slab) const { return slabs_[static_cast<size_t>(slab)]; }
  int64_t BytesOf(int32_t slab) const;
  int64_t RunBytes(int32_t head, int32_t span) const;
  // Groups of this size in a single slab.
  int64_t GroupsIn(int32_t slab, int64_t group_bytes) const;
  Place PlaceOf(uint32_t entry) const;
  void CountPinned(uint32_t entry, int64_t change);
  Group& GroupOf(uint32_t entry);
  const Group& GroupOf(uint32_t entry) const;
  void CutSlabs(int64_t group_bytes);
  int64_t MostGroupsOfSlab() const;
  int32_t RunSlabs(int64_t group_bytes) const;
  // Returns true for slabs that count as free in addition to the free ones.
  using AlsoFree = std::function<bool(int32_t)>;
  // Returns the run of slabs from `first` on that the layout would take; none if the slab is not
  // free or no group fits.
  Run RunAt(int32_t first, const Layout& layout, const AlsoFree* also_free = nullptr) const;
  int64_t CountRuns(const Layout& layout, const AlsoFree* also_free) const;  // groups in them
  // Returns true if only idle groups keep the slab; with `own_only`, only idle groups of this
  // layout's owner.
  bool HeldByIdleGroups(int32_t slab, LayoutId layout, bool own_only) const;
  // Updates the idle list after the group's references or pins have changed.
  void Settle(uint32_t entry, Group& group);
  int32_t AssignRun(LayoutId layout);  // its head, or kNone
  void ReturnRun(int32_t head);
  Mark SlabMark(int32_t slab) const;
  void Link(int32_t slab);
  void Unlink(int32_t slab);
  void Free(uint32_t entry);
  std::string CheckSlab(int32_t index, const std::unordered_map<uint32_t, int32_t>& references,
                        int64_t* groups_seen) const;

  const int64_t bytes_;
  const Books books_;
  std::function<int64_t()> now_;  // null: lifetimes are not watched
  std::function<void(int64_t)> on_freed_;
  uint64_t freed_ = 0;
  int64_t slab_bytes_;
  int32_t first_free_ = 0;  // no free slab before it
  std::vector<Slab> slabs_;
  std::vector<Layout> layouts_;
  SlabPoolStats stats_;
  TakeRefusal refusal_ = TakeRefusal::kNoRoom;
  mutable uint64_t steps_ = 0;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_SLAB_POOL_H_
