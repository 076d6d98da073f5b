// The scheduler's planner as the conformance runner's source of plans.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_SCHEDULER_PLAN_H_
#define MLA_TESTS_CONFORMANCE_SUITE_SCHEDULER_PLAN_H_

#include "kernels/attention_backend.h"
#include "tests/conformance/suite/plan_builder.h"

namespace mla::conformance {

// A builder with a planner and buffers of its own, ample for any sampled case. Buffers come from
// `backend`, which must outlive the builder.
PlanBuilder SchedulerPlanBuilder(kernels::AttentionBackend& backend);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_SCHEDULER_PLAN_H_
