// A finished plan together with the batch that it was made for.
//
// An ExecutionPlan exists filled or not at all: PlanCache is the only one that makes them, after
// Planner::Build succeeded. Code that holds one never asks whether its arrays are ready.
#ifndef MLA_SCHEDULER_PLANNING_CACHE_EXECUTION_PLAN_H_
#define MLA_SCHEDULER_PLANNING_CACHE_EXECUTION_PLAN_H_

#include <span>

#include "kernels/types/attention_params.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

class ExecutionPlan final {
 public:
  // Goes into AttentionParams::plan as it is. The i-th segment record of the launch must have the
  // lengths and heads of segments()[i].
  const kernels::PlanView& view() const { return view_; }
  // The segments that the plan was made for; valid as long as the plan.
  std::span<const PlanSegment> segments() const { return segments_; }
  // As Planner::last_imbalance: the busiest unit over the mean; 1.0 is perfect.
  double imbalance() const { return imbalance_; }

 private:
  friend class PlanCache;
  ExecutionPlan(const kernels::PlanView& view, std::span<const PlanSegment> segments,
                double imbalance)
      : view_(view), segments_(segments), imbalance_(imbalance) {}

  kernels::PlanView view_;
  std::span<const PlanSegment> segments_;
  double imbalance_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_CACHE_EXECUTION_PLAN_H_
