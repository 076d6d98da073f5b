// Finished plans, kept while they may be of use. One step runs the same lengths at every layer, so
// all layers after the first find their plan here. A plan that a running launch reads is never
// changed, because each plan has its own buffers.
//
// The key of a plan is the whole content of its batch: every segment and every trait is compared,
// not a digest of them. Per launch:
//
//   plan = cache.Pin(segments, traits, slot)     pins the plan for the launch slot
//   ... enqueue, Submit(slot) ... Wait(slot)
//   cache.Unpin(slot)                            before the slot's next launch
//
// Ownership: the cache owns plans and buffers; a returned pointer stays valid and its content
// unchanged until Unpin of the slot that it was taken for. Threading: owned by the engine role.
// Allocates nothing after Create.
#ifndef MLA_SCHEDULER_PLANNING_CACHE_PLAN_CACHE_H_
#define MLA_SCHEDULER_PLANNING_CACHE_PLAN_CACHE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/planning/cache/execution_plan.h"
#include "scheduler/planning/planner.h"
#include "scheduler/planning/round_planner.h"

namespace mla::scheduler {

struct PlanCacheOptions {
  PlanCapacity capacity;  // of each plan, from Planner::Capacity
  int32_t plans = 4;      // plans kept at a time; at least one more than running launches pin
  // Only plans with rounds (PlanTraits::rounds) use this many of them.
  int32_t round_plans = 0;
  RoundCapacity rounds;          // for each plan with rounds
  int32_t launch_slots = 2;      // 1 .. 64
  int32_t plan_segments = 0;     // most segments of one plan
  const Clock* clock = nullptr;  // by which builds are timed; null: they are not
};

struct PlanCacheStats {  // counters since Create
  uint64_t hits = 0;
  uint64_t misses = 0;  // plans built
  // The time that building took. Reuse is not timed: a reading of the clock costs as much as a hit.
  int64_t build_ns = 0;
};

class PlanCache final {
 public:
  // INVALID_ARGUMENT names the option; RESOURCE_EXHAUSTED means that the backend cannot allocate
  // the buffers.
  static absl::StatusOr<std::unique_ptr<PlanCache>> Create(const PlanCacheOptions& options,
                                                           kernels::AttentionBackend& backend);
  // Creates a cache over the given buffers: options.plans of them, each of options.capacity.
  static absl::StatusOr<std::unique_ptr<PlanCache>> Create(
      const PlanCacheOptions& options, std::vector<std::unique_ptr<MetadataBuffers>> buffers);

  // Returns the plan of this batch, pinned for `launch_slot`: an existing one, or a new one that
  // replaces the unpinned plan unused for longest. A slot may pin several plans. Errors are as for
  // Planner::Build; also RESOURCE_EXHAUSTED if every plan is pinned.
  absl::StatusOr<const ExecutionPlan*> Pin(std::span<const PlanSegment> segments,
                                           const kernels::PlanTraits& traits, int32_t launch_slot);
  // Removes all pins of the slot, whose launch must have completed.
  void Unpin(int32_t launch_slot);

  const PlanCacheStats& stats() const { return stats_; }

 private:
  struct Entry {
    std::unique_ptr<MetadataBuffers> buffers;
    std::unique_ptr<RoundBuffers> rounds;  // for plans with rounds
    kernels::RoundView round_view;
    std::vector<PlanSegment> segments;  // the key, together with `traits`
    kernels::PlanTraits traits;
    std::optional<ExecutionPlan> plan;
    uint64_t pins = 0;       // bit s: launch slot s pins it
    uint64_t last_used = 0;  // value of uses_ at the last Get of it
  };

  PlanCache(const PlanCacheOptions& options, std::vector<std::unique_ptr<MetadataBuffers>> buffers);
  Entry* Find(std::span<const PlanSegment> segments, const kernels::PlanTraits& traits);
  Entry* OldestUnpinned(bool with_rounds);
  MonotonicNanos Now() const { return options_.clock == nullptr ? 0 : options_.clock->Now(); }
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
