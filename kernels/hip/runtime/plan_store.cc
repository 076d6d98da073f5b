#include "kernels/hip/runtime/plan_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {

absl::StatusOr<std::unique_ptr<PlanStore>> PlanStore::Create(GpuRuntime* runtime, int32_t copies,
                                                             int64_t bytes) {
  std::unique_ptr<PlanStore> store(new PlanStore(runtime));
  store->entries_.resize(static_cast<size_t>(copies));
  for (Entry& entry : store->entries_) {
    MLA_ASSIGN_OR_RETURN(StagedRegion region, StagedRegion::Create(runtime, "plan", bytes));
    entry.region = std::move(region);
  }
  return store;
}

PlanStore::Entry* PlanStore::Find(uint64_t generation) {
  if (generation == 0) return nullptr;
  const auto found = std::find_if(entries_.begin(), entries_.end(), [generation](const Entry& e) {
    return e.generation == generation;
  });
  return found == entries_.end() ? nullptr : &*found;
}

PlanStore::Entry* PlanStore::OldestFree() {
  Entry* oldest = nullptr;
  for (Entry& entry : entries_) {
    if (entry.held == 0 && (oldest == nullptr || entry.last_used < oldest->last_used)) {
      oldest = &entry;
    }
  }
  return oldest;
}

absl::Status PlanStore::Upload(const PlanView& plan, Entry& entry, Stream stream) {
  StagedRegion& region = entry.region;
  region.Clear();
  entry.plan = DevicePlan();
  absl::Status status;
  const auto put = [&](const auto& values, auto& at) {
    auto placed = region.Put(values);
    status.Update(placed.status());
    if (placed.ok()) at = *placed;
  };
  const RoundView* const rounds = plan.rounds;
  if (rounds != nullptr) {
    put(rounds->expansions, entry.plan.expansions);
    put(rounds->items, entry.plan.items);
    put(rounds->unit_indptr, entry.plan.unit_indptr);
  } else {
    put(plan.work_indptr, entry.plan.work_indptr);
    put(plan.work_info, entry.plan.work_info);
  }
  if (rounds == nullptr || rounds->merges) {
    put(plan.reduce_indptr, entry.plan.reduce_indptr);
    put(plan.reduce_final_map, entry.plan.reduce_final_map);
    put(plan.reduce_partial_map, entry.plan.reduce_partial_map);
  }
  if (!status.ok()) return status;
  ++uploads_;
  return runtime_->CopyIn(region.device(0), region.host(0), region.used(), stream);
}

absl::StatusOr<DevicePlan> PlanStore::Get(const PlanView& plan, int32_t slot, Stream stream) {
  Entry* entry = Find(plan.generation);
  if (entry == nullptr) {
    entry = OldestFree();
    if (entry == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("plans on the device: all ", entries_.size(), " are in use"));
    }
    entry->generation = 0;  // until the upload has succeeded
    MLA_RETURN_IF_ERROR(Upload(plan, *entry, stream));
    entry->generation = plan.generation;
  }
  entry->held |= uint64_t{1} << slot;
  entry->last_used = ++uses_;
  return entry->plan;
}

void PlanStore::Release(int32_t slot) {
  for (Entry& entry : entries_) entry.held &= ~(uint64_t{1} << slot);
}

}  // namespace mla::kernels::hip
