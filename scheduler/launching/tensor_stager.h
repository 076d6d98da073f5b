// Places the tensors of a batch where its launch reads and writes them.
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

// One request's rows of a launch, as the backend sees them.
struct StagedTensors {
  const std::byte* kv = nullptr;
  const std::byte* q = nullptr;
  kernels::FragmentedInput q_fragments;  // in place of q, if it has bytes
  std::byte* o = nullptr;
  float* lse = nullptr;
  int32_t* differs = nullptr;          // for a repeat
  const std::byte* entries = nullptr;  // entries that its rows complete
  const float* sinks = nullptr;        // sinks of its heads
  // Index lists of the rows, as SegmentRecord has them.
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

  // Lays out the tensors of to->batch in to->layout. Head slices of the EXPANDED profile get their
  // projections, too. RESOURCE_EXHAUSTED names the exhausted resource.
  absl::Status Stage(BatchLaunch* to);
  // Results of the last Stage, by position in batch.requests and in batch.slices.
  const StagedTensors& request(size_t index) const { return requests_[index]; }
  const StagedTensors& slices(size_t index) const { return slices_[index]; }

 private:
  absl::Status StageKv(BatchLaunch* to, const StreamRequest& request, StagedTensors* staged);
  // Takes memory for comparing repeats with the stored rows.
  absl::Status StageComparisons(BatchLaunch* to);
  absl::Status StageQueryAndOutput(BatchLaunch* to, const StreamRequest& request,
                                   StagedTensors* staged);
  absl::Status StageLists(BatchLaunch* to, const StreamRequest& request, StagedTensors* staged);
  absl::Status StageSinks(BatchLaunch* to, const StreamRequest& request, StagedTensors* staged);
  absl::Status StageSelection(BatchLaunch* to, const StreamRequest& request, StagedTensors* staged);
  absl::Status StageRequest(BatchLaunch* to, size_t index, StagedTensors* staged);
  // `staged` is of all heads, side by side, in the absorbed form.
  absl::Status StageSlices(BatchLaunch* to, const FusedSlices& slices, StagedTensors* staged);
  absl::Status StageAbsorbedSlices(BatchLaunch* to, const FusedSlices& slices,
                                   StagedTensors* staged);
  absl::Status StageExpandedSlices(BatchLaunch* to, const FusedSlices& slices,
                                   StagedTensors* staged);
  absl::Status StageLse(BatchLaunch* to, const FusedSlices& slices, StagedTensors* staged);
  // Takes memory for log-sum-exps that no client wants: they are checked nevertheless.
  absl::Status StageUnwantedLse(BatchLaunch* to);
  // Queries, outputs and log-sum-exps of a run, each in one piece.
  absl::Status StageRun(BatchLaunch* to, const RowRun& run);

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
