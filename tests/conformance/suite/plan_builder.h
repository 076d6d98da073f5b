// Source of the runner's plans: any function from lengths to a plan.
//
// The scheduler's planner is the important one (scheduler_plan.h wraps it). EvenPlanBuilder is a
// second, deliberately naive one: it cuts every tile into equal pieces, whatever the rows can see,
// so that kernels meet empty pieces and fully masked pieces.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_PLAN_BUILDER_H_
#define MLA_TESTS_CONFORMANCE_SUITE_PLAN_BUILDER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"

namespace mla::conformance {

struct PlanShape {
  int32_t q_rows = 0;
  int32_t kv_rows = 0;
  int32_t num_heads = 1;
  bool causal = true;
};

// The view stays valid until the next call of the same builder. `traits.units` is the number of
// units to plan for.
using PlanBuilder = std::function<absl::StatusOr<kernels::PlanView>(
    std::span<const PlanShape> shapes, const kernels::PlanTraits& traits)>;

class EvenPlanBuilder {
 public:
  absl::StatusOr<kernels::PlanView> Build(std::span<const PlanShape> shapes,
                                          const kernels::PlanTraits& traits);

 private:
  void AddTile(int32_t request, const PlanShape& shape, int32_t q_begin, int32_t q_end,
               uint32_t heads, const kernels::PlanTraits& traits);

  std::vector<int32_t> work_indptr_, reduce_indptr_, reduce_partial_map_;
  std::vector<kernels::WorkInfo> work_info_;
  std::vector<kernels::ReduceTile> reduce_final_map_;
  int32_t partial_rows_ = 0;
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_PLAN_BUILDER_H_
