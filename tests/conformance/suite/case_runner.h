// Runs a workload on one backend. The pages are filled with NaN (poison.h). Two launches follow;
// with CaseSpec::other_scales, scales of rows change between them, and the second compares no rows.
// The first appends the rows (fp32 sources are rounded). The second sends them again for comparison
// and attends to them, with the projections that the case asks for. Outputs come back as fp32.
// Query, output and LSE tensors are strided, with gaps that hold NaN on the way in and a sentinel
// on the way out. On unified-memory backends a write into a gap is reported.
//
// A runner owns its backend's configuration and is used by one thread; make one per thread.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_CASE_RUNNER_H_
#define MLA_TESTS_CONFORMANCE_SUITE_CASE_RUNNER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/launch_layout.h"
#include "scheduler/planning/round_planner.h"
#include "tests/conformance/cases/workload.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/runner_options.h"

namespace mla::conformance {

struct RunOptions {
  int32_t units = 0;              // 0: the case's
  int32_t only_request = -1;      // >= 0: run this request alone (its rows are still all appended)
  bool check_stored_rows = true;  // the pool must hold the appended rows, rounded
};

struct CaseOutput {
  // Results of the requests that ran, concatenated: o [q_rows, num_heads, o_dim], lse [q_rows,
  // num_heads].
  std::vector<float> o;
  std::vector<float> lse;
  // Faults other than wrong values: stray writes, rows stored wrongly. Empty if there are none.
  std::string violation;
};

class CaseRunner {
 public:
  // `backend` must be fresh (not configured). It must outlive the runner, and so must the objects
  // that `plan` refers to.
  static absl::StatusOr<std::unique_ptr<CaseRunner>> Create(kernels::AttentionBackend& backend,
                                                            PlanBuilder plan,
                                                            const RunnerOptions& options = {});

  absl::StatusOr<CaseOutput> Run(const Workload& workload, const RunOptions& options = {});

  kernels::AttentionBackend& backend() { return backend_; }
  void set_plan(PlanBuilder plan) { plan_ = std::move(plan); }

 private:
  struct Tensors;  // addresses and strides of one request in a launch

  CaseRunner(kernels::AttentionBackend& backend, PlanBuilder plan, const RunnerOptions& options)
      : backend_(backend), plan_(std::move(plan)), options_(options) {}

  absl::StatusOr<int32_t> WeightsSlot(const Weights& weights);
  absl::StatusOr<std::byte*> Take(int64_t bytes);
  absl::Status WriteTables(const Workload& workload);
  absl::Status Poison(const Workload& workload);
  absl::Status Append(const Workload& workload);
  absl::Status Compare();
  absl::Status ChangeAllScales();
  // Submits launch_ with the tensors of layout_, and waits.
  absl::Status Launch();
  absl::StatusOr<const int32_t*> StageIndices(const std::vector<int32_t>& values);
  absl::StatusOr<Tensors> MakeTensors(const Workload& workload, size_t request);
  absl::Status StageQueries(std::byte* host, int64_t bytes, Tensors& tensors);
  absl::Status Attend(const Workload& workload, const RunOptions& options,
                      std::vector<Tensors>& tensors);
  // The plan of these shapes, with rounds if the backend asks for them.
  absl::StatusOr<kernels::PlanView> Plan(const kernels::AttentionDesc& desc,
                                         std::span<const PlanShape> shapes, int32_t units);
  absl::Status Project(const Workload& workload, const std::vector<Tensors>& tensors, bool absorb);
  void Collect(const Workload& workload, const std::vector<Tensors>& tensors, CaseOutput& output);
  std::string CheckStored(const Workload& workload);

  kernels::AttentionBackend& backend_;
  PlanBuilder plan_;
  RunnerOptions options_;
  int32_t round_units_ = 0;                                 // units of the next two members
  std::unique_ptr<scheduler::RoundPlanner> round_planner_;  // only if the backend has rounds
  std::unique_ptr<scheduler::RoundBuffers> rounds_;
  absl::StatusOr<kernels::RoundView> round_view_;  // for the last plan
  std::unique_ptr<kernels::HostBuffer> arena_;
  int64_t arena_used_ = 0;
  std::vector<const Weights*> loaded_;  // by weights slot
  kernels::LaunchLayout layout_;
  std::vector<uint32_t> tables_;
  // The launch in flight, and the data that it refers to.
  kernels::Launch launch_;
  std::vector<int64_t> table_first_;  // by request
  std::vector<kernels::AppendRecord> appends_, compares_;
  std::vector<int32_t> differs_;  // by row of all records
  std::vector<kernels::ProjectionRecord> absorbs_, projects_;
  std::vector<kernels::SegmentRecord> records_;
  std::vector<kernels::TableRange> table_ranges_;
  std::deque<std::vector<kernels::InputFragment>> fragments_;  // by request
  std::vector<kernels::FragmentedInput> queries_;              // by request that runs
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_CASE_RUNNER_H_
