#include "scheduler/kvcache/pool/slab_pool.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

using kernels::kPageGranuleBytes;

// Enough slabs for several models to share the budget, but few enough that a group rarely needs
// two.
constexpr int64_t kSlabsWanted = 32;

constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

SlabPool::SlabPool(int64_t bytes, int64_t slab_bytes, Books books)
    : bytes_(bytes / kPageGranuleBytes * kPageGranuleBytes),
      books_(books),
      slab_bytes_(RoundUp(slab_bytes, kPageGranuleBytes)) {
  stats_.bytes_total = bytes_;
}

void SlabPool::WatchLifetimes(std::function<int64_t()> now, std::function<void(int64_t)> on_freed) {
  now_ = std::move(now);
  on_freed_ = std::move(on_freed);
}

absl::StatusOr<LayoutId> SlabPool::AddLayout(const GroupLayout& layout, PoolAccount* account) {
  const int64_t group_bytes = layout.group_bytes();
  if (group_bytes > bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("page group: needs ", group_bytes, " bytes, limit ", bytes_));
  }
  if (slabs_.empty()) CutSlabs(group_bytes);
  const int32_t run_slabs = RunSlabs(group_bytes);
  const int64_t of_run = run_slabs * slab_bytes_ / group_bytes;
  for (size_t s = 0; s < slabs_.size() && books_ == Books::kAtOnce; ++s) {
    const int64_t of_slab = GroupsIn(static_cast<int32_t>(s), group_bytes);
    const int64_t most = std::max<int64_t>(1, group_bytes > slab_bytes_ ? of_run : of_slab);
    if (slabs_[s].groups.size() < static_cast<size_t>(most)) {
      slabs_[s].groups.resize(static_cast<size_t>(most));
    }
  }
  auto slot = std::find_if(layouts_.begin(), layouts_.end(), [](const Layout& existing) {
    return !existing.active && existing.groups_used == 0;
  });
  if (slot == layouts_.end()) slot = layouts_.insert(slot, Layout());
  *slot = Layout();
  slot->layout = layout;
  slot->rows_lead = RowsLead(layout);
  slot->active = true;
  slot->account = account;
  slot->group_bytes = group_bytes;
  slot->run_slabs = run_slabs;
  return static_cast<LayoutId>(slot - layouts_.begin());
}

void SlabPool::CutSlabs(int64_t group_bytes) {
  if (slab_bytes_ == 0) {
    slab_bytes_ = group_bytes * std::max<int64_t>(1, bytes_ / kSlabsWanted / group_bytes);
  }
  slab_bytes_ = std::min(std::max(slab_bytes_, group_bytes), bytes_);
  const int64_t count = (bytes_ + slab_bytes_ - 1) / slab_bytes_;
  slabs_.resize(static_cast<size_t>(count));
  stats_.slabs_free = count;
}

void SlabPool::RemoveLayout(LayoutId layout) {
  Require(Has(layout) && Of(layout).groups_used == Of(layout).groups_pinned,
          "removal of a layout in use");
  Layout& owner = Of(layout);
  owner.active = false;
  // Groups that page work still pins remain after the layout, but its account may not.
  PoolAccount* const account = std::exchange(owner.account, nullptr);
  if (account == nullptr) return;
  for (int64_t g = 0; g < owner.groups_pinned; ++g) account->ReturnGroup(owner.group_bytes);
  for (int32_t s = 0; s < static_cast<int32_t>(slabs_.size()); ++s) {
    if (At(s).layout == layout) account->ReturnSlab(RunBytes(s, At(s).span));
  }
}

bool SlabPool::Has(LayoutId layout) const {
  return layout >= 0 && layout < static_cast<int64_t>(layouts_.size()) && Of(layout).active;
}

SlabPool::Taken SlabPool::Take(LayoutId layout, TenantKey tenant) {
  ++steps_;
  Layout& owner = Of(layout);
  refusal_ = TakeRefusal::kGroupBound;
  if (owner.account != nullptr && !owner.account->TakeGroup(owner.group_bytes)) return {};
  refusal_ = TakeRefusal::kNoRoom;
  const int32_t index = owner.open_head != kNone ? owner.open_head : AssignRun(layout);
  if (index == kNone) {
    if (owner.account != nullptr) owner.account->ReturnGroup(owner.group_bytes);
    return {};
  }
  Slab& slab = At(index);
  int32_t free_group = slab.free_head;
  if (free_group != kNone) {
    slab.free_head = slab.groups[static_cast<size_t>(free_group)].next_free;
  } else {
    free_group = slab.groups_fresh++;
    if (static_cast<size_t>(free_group) == slab.groups.size()) slab.groups.emplace_back();
    if (free_group == slab.marked)
      slab.groups[static_cast<size_t>(slab.marked++)].mark = slab.rest_mark;
  }
  Group& group = slab.groups[static_cast<size_t>(free_group)];
  Require(group.references == 0, "a page group in use is on the free list");
  group.references = 1;
  group.mark_before = group.mark;
  group.mark = tenant;
  if (now_) group.taken_ns = now_();
  if (++slab.groups_used == slab.groups_total) Unlink(index);
  ++owner.groups_used;
  ++stats_.groups_used;
  --stats_.groups_free;
  stats_.bytes_used += owner.group_bytes;
  const int64_t offset = index * slab_bytes_ + free_group * owner.group_bytes;
  return {static_cast<uint32_t>(offset / kPageGranuleBytes),
          group.mark_before != kClean && group.mark_before != tenant};
}

void SlabPool::Untake(uint32_t entry) {
  Group& group = GroupOf(entry);
  Require(group.references == 1, "undo of a page group that is shared or free");
  group.mark = group.mark_before;
  group.taken_ns = kUntaken;
  Drop(entry);
}

void SlabPool::Share(uint32_t entry) {
  ++steps_;
  Group& group = GroupOf(entry);
  Require(group.references > 0 || group.pins > 0, "a free page group is shared");
  const int32_t now = ++group.references;
  if (now == 2) ++stats_.groups_shared;
  if (now == 1) CountPinned(entry, -1);
  Settle(entry, group);
}

bool SlabPool::Drop(uint32_t entry) {
  ++steps_;
  Group& group = GroupOf(entry);
  Require(group.references > 0, "a page group is freed twice");
  const int32_t remaining = --group.references;
  if (remaining == 1) --stats_.groups_shared;
  Settle(entry, group);
  if (remaining > 0) return false;
  CountPinned(entry, 1);
  if (group.pins == 0) Free(entry);
  return true;
}

void SlabPool::CountPinned(uint32_t entry, int64_t change) {
  Layout& owner = Of(At(PlaceOf(entry).slab).layout);
  owner.groups_pinned += change;
  stats_.groups_pinned += change;
  stats_.bytes_pinned += change * owner.group_bytes;
}

void SlabPool::Pin(uint32_t entry) {
  Group& group = GroupOf(entry);
  ++group.pins;
  Settle(entry, group);
}

void SlabPool::Unpin(uint32_t entry) {
  Group& group = GroupOf(entry);
  Require(group.pins > 0, "a page group is unpinned twice");
  if (--group.pins == 0 && group.references == 0) return Free(entry);
  Settle(entry, group);
}

void SlabPool::PinSource(uint32_t entry, int32_t rows) {
  Group& group = GroupOf(entry);
  ++group.pins;
  ++group.sources;
  group.pinned_rows = std::max(group.pinned_rows, rows);
  Settle(entry, group);
}

void SlabPool::UnpinSource(uint32_t entry) {
  Group& group = GroupOf(entry);
  Require(group.sources > 0, "a page group is unpinned twice as a source");
  if (--group.sources == 0) group.pinned_rows = 0;
  Unpin(entry);
}

int32_t SlabPool::pinned_rows(uint32_t entry) const { return GroupOf(entry).pinned_rows; }

int32_t SlabPool::work(uint32_t entry) const { return GroupOf(entry).work; }

void SlabPool::RestoreMark(uint32_t entry) {
  Group& group = GroupOf(entry);
  group.mark = group.mark_before;
}

void SlabPool::Free(uint32_t entry) {
  const Place place = PlaceOf(entry);
  Slab& slab = At(place.slab);
  Layout& owner = Of(slab.layout);
  Group& group = slab.groups[static_cast<size_t>(place.group)];
  --owner.groups_pinned;
  --stats_.groups_pinned;
  stats_.bytes_pinned -= owner.group_bytes;
  if (on_freed_ && group.taken_ns != kUntaken && ++freed_ % kLifetimeSample == 0) {
    on_freed_(now_() - group.taken_ns);
  }
  group.next_free = slab.free_head;
  slab.free_head = place.group;
  --owner.groups_used;
  --stats_.groups_used;
  ++stats_.groups_free;
  stats_.bytes_used -= owner.group_bytes;
  if (owner.account != nullptr) owner.account->ReturnGroup(owner.group_bytes);
  const bool was_full = slab.groups_used-- == slab.groups_total;
  if (was_full) Link(place.slab);
  if (slab.groups_used == 0) ReturnRun(place.slab);
}

int32_t SlabPool::references(uint32_t entry) const { return GroupOf(entry).references; }

int64_t SlabPool::CountRuns(const Layout& layout, const AlsoFree* also_free) const {
  int64_t groups = 0;
  const auto count = static_cast<int32_t>(slabs_.size());
  for (int32_t s = also_free == nullptr ? first_free_ : 0; s < count;) {
    const Run run = RunAt(s, layout, also_free);
    groups += run.groups;
    s += std::max(run.slabs, 1);
  }
  return groups;
}

int64_t SlabPool::BytesLeft(LayoutId layout) const {
  const int64_t size = Of(layout).group_bytes;
  const auto last = static_cast<int32_t>(slabs_.size()) - 1;
  const int64_t last_free = At(last).head == kNone ? 1 : 0;  // it may be shorter
  const int64_t others = stats_.slabs_free - last_free;
  int64_t groups = free_in_slabs(layout);
  if (size <= slab_bytes_) {
    groups += others * GroupsIn(0, size) + last_free * GroupsIn(last, size);
  } else {
    groups += (others * slab_bytes_ + last_free * BytesOf(last)) / size;
  }
  return groups * size;
}

SlabPool::Mark SlabPool::Merge(Mark a, Mark b) {
  if (a == b || b == kClean) return a;
  return a == kClean ? b : kMixed;
}

int64_t SlabPool::BytesOf(int32_t slab) const {
  return std::min(slab_bytes_, bytes_ - slab * slab_bytes_);
}

int64_t SlabPool::RunBytes(int32_t head, int32_t span) const {
  int64_t bytes = 0;
  for (int32_t s = head; s < head + span; ++s) bytes += BytesOf(s);
  return bytes;
}

int64_t SlabPool::GroupsIn(int32_t slab, int64_t group_bytes) const {
  return std::min(BytesOf(slab) / group_bytes, MostGroupsOfSlab());
}

int64_t SlabPool::MostGroupsOfSlab() const {
  return std::max<int64_t>(1, kMostGroups / static_cast<int64_t>(slabs_.size()));
}

SlabPool::Place SlabPool::PlaceOf(uint32_t entry) const {
  const int64_t position = offset(entry);
  Require(position < bytes_, "a page table entry points past the pool");
  const int32_t head = At(static_cast<int32_t>(position / slab_bytes_)).head;
  Require(head != kNone, "a page table entry points into a free slab");
  const int64_t inside = position - head * slab_bytes_;
  const auto group = static_cast<int32_t>(inside / Of(At(head).layout).group_bytes);
  Require(group < At(head).groups_total, "a page table entry points past its slab's groups");
  return {head, group};
}

SlabPool::Group& SlabPool::GroupOf(uint32_t entry) {
  const Place place = PlaceOf(entry);
  return At(place.slab).groups[static_cast<size_t>(place.group)];
}

const SlabPool::Group& SlabPool::GroupOf(uint32_t entry) const {
  const Place place = PlaceOf(entry);
  return At(place.slab).groups[static_cast<size_t>(place.group)];
}

// The smallest run that wastes little, or else the run that wastes least. No shorter run wastes
// less; RunAt relies on this.
int32_t SlabPool::RunSlabs(int64_t group_bytes) const {
  const auto least = static_cast<int32_t>((group_bytes + slab_bytes_ - 1) / slab_bytes_);
  if (least == 1) return 1;
  int32_t best = least;
  for (int32_t slabs = least; slabs <= kMostRunSlabs; ++slabs) {
    const int64_t bytes = slabs * slab_bytes_;
    if (bytes / group_bytes > MostGroupsOfSlab()) break;
    const int64_t rest = bytes % group_bytes;
    if (rest > best * slab_bytes_ % group_bytes) continue;
    best = slabs;
    if (rest * kRunWaste <= bytes) break;
  }
  return best;
}

// Free neighbours are taken from the left, in runs of run_slabs and a shorter one. This is optimal:
// two separate ranges of free slabs never hold more groups than one range of their joined length.
// At least one of their two shorter runs consists of whole slabs, so it wastes at least as much as
// the longer run that would cover both.
SlabPool::Run SlabPool::RunAt(int32_t first, const Layout& layout,
                              const AlsoFree* also_free) const {
  const int64_t size = layout.group_bytes;
  const auto count = static_cast<int32_t>(slabs_.size());
  int32_t row = 0;
  for (; first + row < count && row < layout.run_slabs; ++row) {
    ++steps_;
    const int32_t s = first + row;
    if (At(s).head != kNone && (also_free == nullptr || !(*also_free)(s))) break;
  }
  if (row == 0) return {};
  const int64_t groups = size <= slab_bytes_ ? GroupsIn(first, size) : RunBytes(first, row) / size;
  if (groups == 0) return {};
  // Counts only the slabs that the groups need.
  const int64_t slabs = size <= slab_bytes_ ? 1 : (groups * size + slab_bytes_ - 1) / slab_bytes_;
  return {static_cast<int32_t>(slabs), static_cast<int32_t>(groups)};
}

int32_t SlabPool::AssignRun(LayoutId layout) {
  Layout& owner = Of(layout);
  const auto count = static_cast<int32_t>(slabs_.size());
  for (; first_free_ < count && At(first_free_).head != kNone; ++first_free_) ++steps_;
  int32_t head = first_free_;
  Run run;
  for (; head < count; ++head) {
    run = RunAt(head, owner);
    if (run.groups > 0) break;
  }
  if (run.groups == 0) return kNone;
  // The account's bound may leave room for a shorter run.
  while (owner.account != nullptr && !owner.account->TakeSlab(RunBytes(head, run.slabs))) {
    --run.slabs;
    run.groups = static_cast<int32_t>(RunBytes(head, run.slabs) / owner.group_bytes);
    if (run.groups > 0) continue;
    refusal_ = TakeRefusal::kSlabBound;
    return kNone;
  }

  Slab& slab = At(head);
  const int32_t span = run.slabs;
  slab.groups_total = run.groups;
  if (span > 1 || slab.mark_bytes != owner.group_bytes) {
    Mark mark = kClean;
    for (int32_t s = head; s < head + span; ++s) mark = Merge(mark, SlabMark(s));
    slab.marked = 0;
    slab.rest_mark = mark;
    slab.mark_bytes = owner.group_bytes;
  }
  for (int32_t s = head; s < head + span; ++s) At(s).head = head;
  slab.layout = layout;
  slab.span = span;
  slab.groups_used = 0;
  slab.groups_fresh = 0;
  slab.free_head = kNone;
  owner.groups_total += slab.groups_total;
  stats_.groups_free += slab.groups_total;
  stats_.slabs_free -= span;
  Link(head);
  return head;
}

void SlabPool::ReturnRun(int32_t head) {
  Slab& slab = At(head);
  Layout& owner = Of(slab.layout);
  Unlink(head);
  owner.groups_total -= slab.groups_total;
  stats_.groups_free -= slab.groups_total;
  stats_.slabs_free += slab.span;
  if (owner.account != nullptr) owner.account->ReturnSlab(RunBytes(head, slab.span));
  if (slab.span > 1) {
    const Mark mark = SlabMark(head);
    for (int32_t s = head; s < head + slab.span; ++s) {
      At(s).mark_bytes = 0;
      At(s).marked = 0;
      At(s).rest_mark = mark;
    }
  }
  for (int32_t s = head; s < head + slab.span; ++s) At(s).head = kNone;
  slab.layout = kNone;
  slab.span = 1;
  first_free_ = std::min(first_free_, head);
}

SlabPool::Mark SlabPool::SlabMark(int32_t index) const {
  const Slab& slab = At(index);
  Mark mark = slab.rest_mark;
  steps_ += static_cast<uint64_t>(slab.marked);
  for (int32_t g = 0; g < slab.marked; ++g) {
    mark = Merge(mark, slab.groups[static_cast<size_t>(g)].mark);
  }
  return mark;
}

void SlabPool::Link(int32_t index) {
  Slab& slab = At(index);
  Layout& owner = Of(slab.layout);
  slab.prev = kNone;
  slab.next = owner.open_head;
  if (slab.next != kNone) At(slab.next).prev = index;
  owner.open_head = index;
}

void SlabPool::Unlink(int32_t index) {
  Slab& slab = At(index);
  if (slab.prev != kNone) At(slab.prev).next = slab.next;
  if (slab.next != kNone) At(slab.next).prev = slab.prev;
  Layout& owner = Of(slab.layout);
  if (owner.open_head == index) owner.open_head = slab.next;
  slab.prev = slab.next = kNone;
}

// ------------------------------------------------------------------------------------- Idle groups

void SlabPool::Cache(uint32_t entry, int32_t node) {
  Group& group = GroupOf(entry);
  Require(group.cached == kNone && node >= 0, "a page group is cached twice");
  group.cached = node;
  Share(entry);
}

bool SlabPool::Uncache(uint32_t entry) {
  Group& group = GroupOf(entry);
  Require(group.cached != kNone, "a page group leaves the cache twice");
  group.cached = kNone;
  return Drop(entry);
}

void SlabPool::Settle(uint32_t entry, Group& group) {
  const bool alone = group.cached != kNone && group.references == 1;
  const bool idle = alone && group.pins == 0;
  if (alone == group.alone && idle == group.idle) return;
  Slab& slab = At(PlaceOf(entry).slab);
  Layout& owner = Of(slab.layout);
  if (alone != group.alone) {
    group.alone = alone;
    stats_.groups_cached += alone ? 1 : -1;
    stats_.bytes_cached += (alone ? 1 : -1) * owner.group_bytes;
  }
  if (idle == group.idle) return;
  group.idle = idle;
  const int32_t change = idle ? 1 : -1;
  slab.groups_idle += change;
  owner.groups_idle += change;
  stats_.groups_idle += change;
  if (idle) {
    group.idle_prev = owner.idle_last;
    group.idle_next = kNoEntry;
    (owner.idle_last == kNoEntry ? owner.idle_first : GroupOf(owner.idle_last).idle_next) = entry;
    owner.idle_last = entry;
  } else {
    const uint32_t prev = group.idle_prev, next = group.idle_next;
    (prev == kNoEntry ? owner.idle_first : GroupOf(prev).idle_next) = next;
    (next == kNoEntry ? owner.idle_last : GroupOf(next).idle_prev) = prev;
  }
}

bool SlabPool::SameOwner(LayoutId a, LayoutId b) const {
  if (a == b) return true;
  const PoolAccount* const one = Of(a).account;
  const PoolAccount* const other = Of(b).account;
  return one != nullptr && other != nullptr && one->owner() != nullptr &&
         one->owner() == other->owner();
}

int64_t SlabPool::GroupRoom(LayoutId layout) const {
  const PoolAccount* const account = Of(layout).account;
  return account == nullptr ? std::numeric_limits<int64_t>::max() : account->GroupRoom();
}

int64_t SlabPool::GroupBound(LayoutId layout) const {
  const PoolAccount* const account = Of(layout).account;
  return account == nullptr ? std::numeric_limits<int64_t>::max() : account->GroupBound();
}

void SlabPool::Touch(uint32_t entry) {
  if (!GroupOf(entry).idle) return;
  Pin(entry);
  Unpin(entry);
}

bool SlabPool::HeldByIdleGroups(int32_t slab, LayoutId layout, bool own_only) const {
  const int32_t head = At(slab).head;
  if (head == kNone) return false;
  const Slab& of = At(head);
  return of.groups_used == of.groups_idle && (!own_only || SameOwner(of.layout, layout));
}

int64_t SlabPool::FreeWithoutIdle(LayoutId layout, bool own_only) const {
  const Layout& owner = Of(layout);
  const AlsoFree kept = [&](int32_t slab) { return HeldByIdleGroups(slab, layout, own_only); };
  int64_t free = free_in_slabs(layout) + owner.groups_idle + CountRuns(owner, &kept);
  steps_ += slabs_.size();
  // Runs of the layout itself that would be free were counted twice: as its groups, and in
  // CountRuns.
  for (int32_t s = 0; s < static_cast<int32_t>(slabs_.size()); ++s) {
    if (At(s).layout == layout && kept(s)) free -= At(s).groups_total;
  }
  return free;
}

std::vector<uint32_t> SlabPool::IdleSlab(LayoutId layout, bool own_only) const {
  std::vector<uint32_t> entries;
  for (int32_t s = 0; s < static_cast<int32_t>(slabs_.size()) && entries.empty(); ++s) {
    if (At(s).head != s || !HeldByIdleGroups(s, layout, own_only)) continue;
    steps_ += static_cast<uint64_t>(At(s).groups_total);
    const int64_t group_bytes = Of(At(s).layout).group_bytes;
    for (int32_t g = 0; g < At(s).groups_total; ++g) {
      if (!At(s).groups[static_cast<size_t>(g)].idle) continue;
      const int64_t offset = s * slab_bytes_ + g * group_bytes;
      entries.push_back(static_cast<uint32_t>(offset / kernels::kPageGranuleBytes));
    }
  }
  return entries;
}

// -------------------------------------------------------------------------------------- Invariants

bool SlabPool::CountersHold() const {
  int64_t used = 0;
  int64_t total = 0;
  int64_t bytes = 0;
  for (const Layout& layout : layouts_) {
    if (layout.groups_used < 0 || layout.groups_used > layout.groups_total) return false;
    if ((layout.open_head != kNone) != (layout.groups_used < layout.groups_total)) return false;
    used += layout.groups_used;
    total += layout.groups_total;
    bytes += layout.groups_used * layout.group_bytes;
  }
  return used == stats_.groups_used && total == used + stats_.groups_free &&
         bytes == stats_.bytes_used && bytes <= bytes_ && stats_.groups_shared >= 0 &&
         stats_.groups_shared <= used && stats_.groups_pinned >= 0 && stats_.groups_idle >= 0 &&
         stats_.groups_idle <= stats_.groups_cached &&
         stats_.groups_pinned + stats_.groups_cached <= used;
}

std::string SlabPool::CheckSlab(int32_t index,
                                const std::unordered_map<uint32_t, int32_t>& references,
                                int64_t* groups_seen) const {
  const Slab& slab = At(index);
  const auto fault = [&](const auto&... what) {
    return absl::StrCat("slab ", index, ": ", what...);
  };
  const int64_t group_bytes = Of(slab.layout).group_bytes;
  int32_t used = 0;
  int32_t idle = 0;
  for (int32_t g = 0; g < slab.groups_total; ++g) {
    const Group& group = slab.groups[static_cast<size_t>(g)];
    const int32_t have = group.references;
    const int64_t offset = index * slab_bytes_ + g * group_bytes;
    if (offset + group_bytes > index * slab_bytes_ + RunBytes(index, slab.span)) {
      return fault("group ", g, " ends past its slabs");
    }
    const auto held = references.find(static_cast<uint32_t>(offset / kernels::kPageGranuleBytes));
    const int32_t want = held == references.end() ? 0 : held->second;
    if (have != want)
      return fault("group ", g, " counts ", have, " references, tables hold ", want);
    const bool kept = have > 0 || group.pins > 0;
    if (group.pins < group.sources + (group.work != kNone ? 1 : 0)) {
      return fault("group ", g, " has ", group.pins, " pins for more page work");
    }
    if (group.idle != (group.cached != kNone && have == 1 && group.pins == 0)) {
      return fault("group ", g, " is idle or not against its references and pins");
    }
    if (group.idle) ++idle;
    if (kept) ++used;
    if (have > 0) ++*groups_seen;
    if (kept && g >= slab.groups_fresh) return fault("fresh group ", g, " is in use");
    if (kept && g >= slab.marked) return fault("group ", g, " in use has no mark");
  }
  if (used != slab.groups_used) return fault("used ", slab.groups_used, ", counted ", used);
  if (idle != slab.groups_idle) return fault("idle ", slab.groups_idle, ", counted ", idle);
  int32_t freed = 0;
  for (int32_t g = slab.free_head; g != kNone; g = slab.groups[static_cast<size_t>(g)].next_free) {
    const Group& group = slab.groups[static_cast<size_t>(g)];
    if (group.references != 0 || group.pins != 0) return fault("used group is free");
    if (++freed > slab.groups_fresh) return fault("free list is a circle");
  }
  if (freed + used != slab.groups_fresh) return fault("groups lost: ", slab.groups_fresh);
  return "";
}

std::string SlabPool::CheckInvariants(
    const std::unordered_map<uint32_t, int32_t>& references) const {
  if (!CountersHold()) return "counters disagree";
  int64_t bytes = 0;
  int64_t free_slabs = 0;
  int64_t groups_seen = 0;
  for (int32_t s = 0; s < static_cast<int32_t>(slabs_.size()); ++s) {
    bytes += BytesOf(s);
    const Slab& slab = At(s);
    if (slab.head == kNone) ++free_slabs;
    if ((slab.head == s) != (slab.layout != kNone)) return absl::StrCat("slab ", s, ": not a head");
    if (slab.head != s) continue;
    if (std::string fault = CheckSlab(s, references, &groups_seen); !fault.empty()) return fault;
  }
  if (!slabs_.empty() && bytes != bytes_) return "slab bytes do not sum to the budget";
  if (free_slabs != stats_.slabs_free) return "free slabs miscounted";
  if (groups_seen != stats_.groups_used - stats_.groups_pinned) return "pinned groups miscounted";
  if (groups_seen != static_cast<int64_t>(references.size())) {
    return absl::StrCat("tables hold ", references.size(), " groups, slabs ", groups_seen);
  }
  int64_t shared = 0;
  for (const auto& [entry, count] : references) shared += count > 1 ? 1 : 0;
  if (shared != stats_.groups_shared) return "shared groups miscounted";
  return "";
}

}  // namespace mla::kvcache
