// Keeps a finished plan together with the batch for which it was made.
//
// An ExecutionPlan is always filled: only PlanCache makes one, after Planner::Build has succeeded.
// Code that has one need not check whether its arrays are ready.
#ifndef MLA_SCHEDULER_PLANNING_CACHE_EXECUTION_PLAN_H_
#define MLA_SCHEDULER_PLANNING_CACHE_EXECUTION_PLAN_H_

#include <span>

#include "kernels/types/attention_params.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

class ExecutionPlan final {
 public:
  // Returns the value for AttentionParams::plan. The i-th segment record of the launch must have
  // the lengths and heads of segments()[i].
  const kernels::PlanView& view() const { return view_; }
  // Returns the segments that the plan was made for; valid as long as the plan.
  std::span<const PlanSegment> segments() const { return segments_; }
  // Planner::last_imbalance of this plan: the busiest unit over the mean; 1.0 is best.
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
