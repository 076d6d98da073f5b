// The part of SlabPool for groups that only the prefix cache holds.
#include <algorithm>
#include <limits>

#include "scheduler/kvcache/pool/require.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::kvcache {

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

}  // namespace mla::kvcache
