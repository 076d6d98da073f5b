// Decides where a launch reads and writes the tensors of its batch.
//
// Threading: owned by the engine role. A launch allocates nothing.
#ifndef MLA_SCHEDULER_LAUNCHING_TENSOR_STAGER_H_
#define MLA_SCHEDULER_LAUNCHING_TENSOR_STAGER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/launch_layout.h"
#include "scheduler/batching/batch.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/limits.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {

// The launched rows of one request, with the addresses that the backend uses.
struct StagedTensors {
  const std::byte* kv = nullptr;
  const std::byte* q = nullptr;
  kernels::FragmentedInput q_fragments;  // used instead of q if it has bytes
  std::byte* o = nullptr;
  float* lse = nullptr;
  int32_t* differs = nullptr;          // for a repeat
  const std::byte* entries = nullptr;  // entries that its rows complete
  const float* sinks = nullptr;        // sinks of its heads
  // The index lists of the rows, in the form of SegmentRecord.
  const int32_t* list = nullptr;
  const int32_t* list_begin = nullptr;
  // For rows whose lists the indexer makes: its inputs, the address for `list`, and the address
  // where the client wants it.
  const std::byte* index_inputs = nullptr;
  int32_t* selected = nullptr;
  int32_t* wanted = nullptr;
};

class TensorStager final {
 public:
  TensorStager(const Limits& limits, const kernels::BackendInfo& info, const ModelTable* models);

  // Lays out the tensors of launch->batch in launch->layout. Head slices of the EXPANDED profile
  // get their projections, too, and requests of PROJECTED their row projections. RESOURCE_EXHAUSTED
  // names the exhausted resource.
  absl::Status Stage(BatchLaunch* launch);
  // Results of the last Stage, by position in batch.requests and in batch.slices.
  const StagedTensors& request(size_t index) const { return requests_[index]; }
  const StagedTensors& slices(size_t index) const { return slices_[index]; }

 private:
  absl::Status StageKv(BatchLaunch* launch, const StreamRequest& request, StagedTensors* staged);
  // Takes memory for comparing repeats with the stored rows.
  absl::Status StageComparisons(BatchLaunch* launch);
  absl::Status StageQueryAndOutput(BatchLaunch* launch, const StreamRequest& request,
                                   StagedTensors* staged);
  // For PROJECTED: takes workspace for queries and outputs, which `staged` then has in place of the
  // client's rows, and adds the products between the two.
  absl::Status StageProjected(BatchLaunch* launch, const StreamRequest& request,
                              StagedTensors* staged);
  absl::Status StageOthers(BatchLaunch* launch);
  absl::Status StageLists(BatchLaunch* launch, const StreamRequest& request, StagedTensors* staged);
  absl::Status StageSinks(BatchLaunch* launch, const StreamRequest& request, StagedTensors* staged);
  absl::Status StageSelection(BatchLaunch* launch, const StreamRequest& request,
                              StagedTensors* staged);
  absl::Status StageRequest(BatchLaunch* launch, size_t index, StagedTensors* staged);
  // For the absorbed form: `staged` gets all heads next to each other.
  absl::Status StageSlices(BatchLaunch* launch, const FusedSlices& slices, StagedTensors* staged);
  absl::Status StageAbsorbedSlices(BatchLaunch* launch, const FusedSlices& slices,
                                   StagedTensors* staged);
  absl::Status StageExpandedSlices(BatchLaunch* launch, const FusedSlices& slices,
                                   StagedTensors* staged);
  absl::Status StageLse(BatchLaunch* launch, const FusedSlices& slices, StagedTensors* staged);
  // Takes memory for log-sum-exps that no client wants. CheckResults reads them, because a NaN
  // shows there.
  absl::Status StageUnwantedLse(BatchLaunch* launch);
  // Stages queries, outputs and log-sum-exps of a run, each as one piece.
  absl::Status StageRun(BatchLaunch* launch, const RowRun& run);

  const int64_t launch_packed_rows_;
  const kernels::BackendInfo& info_;
  const ModelTable* const models_;
  std::vector<StagedTensors> requests_;  // by position in batch.requests
  std::vector<StagedTensors> slices_;    // by position in batch.slices
  std::vector<bool> in_run_;             // by position in batch.requests
  std::vector<kernels::InputPart> in_parts_;
  std::vector<kernels::OutputPart> out_parts_, lse_parts_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_TENSOR_STAGER_H_
