#include "tests/conformance/suite/scheduler_plan.h"

#include <memory>
#include <utility>
#include <vector>

#include "scheduler/planning/planner.h"

namespace mla::conformance {

PlanBuilder SchedulerPlanBuilder(kernels::AttentionBackend& backend) {
  scheduler::PlanCapacity capacity;
  capacity.units = 256;
  capacity.work_items = 200000;
  capacity.reduce_tiles = 100000;
  capacity.reduce_partials = 200000;
  capacity.partial_rows = int64_t{1} << 21;
  struct State {
    scheduler::Planner planner;
    absl::StatusOr<std::unique_ptr<scheduler::MetadataBuffers>> buffers;
    std::vector<scheduler::PlanSegment> requests;
  };
  auto state = std::make_shared<State>();
  state->buffers = scheduler::MetadataBuffers::Create(capacity, backend);
  return [state](std::span<const PlanShape> shapes,
                 const kernels::PlanTraits& traits) -> absl::StatusOr<kernels::PlanView> {
    if (!state->buffers.ok()) return state->buffers.status();
    state->requests.clear();
    for (const PlanShape& shape : shapes) {
      state->requests.push_back({shape.q_rows, shape.kv_rows, shape.num_heads, shape.causal});
    }
    return state->planner.Build(state->requests, traits, **state->buffers);
  };
}

}  // namespace mla::conformance
