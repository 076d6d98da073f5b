// Finished plans, kept while they may be of use. One step runs the same lengths at every layer, so
// all layers after the first find their plan here; and a plan that a running launch reads is never
// touched, because each plan has buffers of its own.
//
// A plan is found by the whole content of its batch: every segment and every trait is compared,
// never a digest. Per launch:
//
//   plan = cache.Get(segments, traits, slot)     pins the plan for the launch slot
//   ... enqueue, Submit(slot) ... Wait(slot)
//   cache.Unpin(slot)                            before the slot's next launch
//
// Ownership: the cache owns plans and buffers; a returned pointer stays valid and its content
// unchanged until Unpin of the slot that it was taken for. Threading: owned by the engine role.
// Nothing allocates after Create.
#ifndef MLA_SCHEDULER_PLANNING_CACHE_PLAN_CACHE_H_
#define MLA_SCHEDULER_PLANNING_CACHE_PLAN_CACHE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/planning/cache/execution_plan.h"
#include "scheduler/planning/metadata_buffers.h"
#include "scheduler/planning/planner.h"
#include "scheduler/planning/round_planner.h"

namespace mla::scheduler {

struct PlanCacheOptions {
  PlanCapacity capacity;  // of each plan, from Planner::Capacity
  int32_t plans = 4;      // kept at a time; at least the plans that running launches pin, plus 1
  // Of these, the plans with rounds (PlanTraits::rounds), which no others take the place of.
  int32_t round_plans = 0;
  RoundCapacity rounds;       // of each of them
  int32_t launch_slots = 2;   // 1 .. 64
  int32_t plan_segments = 0;  // segments of one plan at most
};

struct PlanCacheStats {  // counters since Create
  uint64_t hits = 0;
  uint64_t misses = 0;  // plans built
};

class PlanCache final {
 public:
  // INVALID_ARGUMENT names the option; RESOURCE_EXHAUSTED when the backend has no memory for the
  // buffers.
  static absl::StatusOr<std::unique_ptr<PlanCache>> Create(const PlanCacheOptions& options,
                                                           kernels::AttentionBackend& backend);
  // The same with buffers from elsewhere: options.plans of them, of options.capacity each.
  static absl::StatusOr<std::unique_ptr<PlanCache>> Create(
      const PlanCacheOptions& options, std::vector<std::unique_ptr<MetadataBuffers>> buffers);

  // The plan of this batch, pinned for `launch_slot`: the one that exists, or else a new one in
  // place of the unpinned plan that was used longest ago. A slot may pin several plans. Errors are
  // those of Planner::Build; RESOURCE_EXHAUSTED also when every plan is pinned.
  absl::StatusOr<const ExecutionPlan*> Get(std::span<const PlanSegment> segments,
                                           const kernels::PlanTraits& traits, int32_t launch_slot);
  // Drops all pins of the slot; its launch must have completed.
  void Unpin(int32_t launch_slot);

  const PlanCacheStats& stats() const { return stats_; }

 private:
  struct Entry {
    std::unique_ptr<MetadataBuffers> buffers;
    std::unique_ptr<RoundBuffers> rounds;  // of plans with rounds
    kernels::RoundView round_view;
    std::vector<PlanSegment> segments;  // the key, together with `traits`
    kernels::PlanTraits traits;
    std::optional<ExecutionPlan> plan;
    uint64_t pins = 0;       // bit s: pinned by launch slot s
    uint64_t last_used = 0;  // value of uses_ at the last Get
  };

  PlanCache(const PlanCacheOptions& options, std::vector<std::unique_ptr<MetadataBuffers>> buffers);
  Entry* Find(std::span<const PlanSegment> segments, const kernels::PlanTraits& traits);
  Entry* OldestUnpinned(bool with_rounds);
  absl::Status Build(std::span<const PlanSegment> segments, const kernels::PlanTraits& traits,
                     Entry* entry);

  const PlanCacheOptions options_;
  Planner planner_;
  RoundPlanner round_planner_;
  std::vector<Entry> entries_;
  uint64_t uses_ = 0;
  PlanCacheStats stats_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_CACHE_PLAN_CACHE_H_
