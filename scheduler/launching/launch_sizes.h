// Sizes of everything that launches need, derived from the limits and the backend.
//
// Pure functions; any thread. All but LaunchSlots may be called before the backend is configured.
#ifndef MLA_SCHEDULER_LAUNCHING_LAUNCH_SIZES_H_
#define MLA_SCHEDULER_LAUNCHING_LAUNCH_SIZES_H_

#include <cstdint>

#include "kernels/attention_backend.h"
#include "scheduler/batching/batch_policy.h"
#include "scheduler/limits.h"
#include "scheduler/planning/planner.h"
#include "scheduler/planning/round_planner.h"

namespace mla::scheduler {

// Plans kept: plans that launches in flight pin, and plans that alternate between them. Each batch
// may need one plan for each form, and workers that drift apart by a layer alternate between few
// compositions.
inline constexpr int32_t kPlansPerSlot = 4;
// Plans with rounds, kept in addition: they are for prompts, whose compositions rarely repeat
// except from layer to layer.
inline constexpr int32_t kRoundPlansPerSlot = 2;

// Returns how many launches may be prepared or running at a time.
int32_t LaunchSlots(const kernels::AttentionBackend& backend);
// Returns the number of bytes that one launch has for bringing together queries and outputs of
// fused slices, and for what lies between the products of PROJECTED.
int64_t GatherBytes(const Limits& limits, const kernels::AttentionBackend& backend);
// Returns the sizes of everything that the backend and the plans need under `limits`.
kernels::BackendLimits BackendLimitsOf(const Limits& limits,
                                       const kernels::AttentionBackend& backend);
// Returns the bound of the pieces in one batch if the backend's cuts are fixed: as many piece rows
// as packed rows, plus one row of all heads at the longest context.
PieceBudget PieceBudgetOf(const Limits& limits, const kernels::AttentionBackend& backend);
// Returns the capacity for any batch within the limits and PieceBudgetOf.
PlanCapacity PlanCapacityOf(const Limits& limits, const kernels::AttentionBackend& backend);
// Returns the capacity for the rounds of any such plan; empty if the backend makes no rounds.
RoundCapacity RoundCapacityOf(const Limits& limits, const kernels::AttentionBackend& backend);
// Returns the number of page-table entries of all sequences together.
int64_t PageTableEntries(const Limits& limits);
// Returns the number of host bytes of the plans, page tables and buffers that the engine makes.
int64_t LaunchHostBytes(const Limits& limits, const kernels::AttentionBackend& backend);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_LAUNCH_SIZES_H_
