// The checks of SlabPool, kept apart from the code that they check.
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::kvcache {

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
