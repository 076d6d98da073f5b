// Turns a batch into one launch of the backend: stages tensors, fills the records, gets the plans,
// enqueues the verbs in order and submits. Slots are used round robin, so results come back in
// submission order.
//
// In EXPANDED, short segments take the absorbed form between two projections (rows grouped by their
// weights inside the backend), long ones the expanded form; ABSORBED has the absorbed form only. A
// form that no segment needs is absent: nothing is built for it. Fused slices take the absorbed
// form in one record over all their heads.
//
// Threading: owned by the engine role. Nothing is allocated per launch.
#ifndef MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_
#define MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/batching/batch.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/planning/plan_cache.h"

namespace mla::scheduler {

struct Launch {
  int32_t slot = -1;
  Batch batch;
  LaunchReport report;
  // --- Records; valid until the slot is waited for.
  std::vector<kernels::TableRange> tables;  // entries of page tables that changed
  std::vector<kernels::AppendRecord> appends;
  std::vector<kernels::RequestRecord> absorbed, expanded;
  std::vector<kernels::ProjectionRecord> absorbs, projects;
  std::vector<PlanRequest> plan_absorbed, plan_expanded;
  kernels::AttentionParams absorbed_params, expanded_params;
  // Log-sum-exps of the rows computed, by position in batch.requests: the client's memory, or
  // `unwanted_lse` for requests that ask for none.
  struct LseRows {
    const float* at = nullptr;  // null: nothing was computed
    int64_t row_stride = 0;     // floats
  };
  std::vector<LseRows> lse;
  std::unique_ptr<kernels::HostBuffer> unwanted_lse;  // [launch_packed_rows]
  int64_t unwanted_used = 0;                          // floats of it, from its start
  int64_t unwanted_left = 0;                          // floats that are not taken from its end
  float* unwanted_staged = nullptr;                   // where the launch sees it
  // By position in batch.requests: of a repeat, 1 for each row launched that differs from what is
  // stored and else 0, in `compared`; null for other requests. Empty without repeats.
  std::vector<const int32_t*> differs;
  std::unique_ptr<kernels::HostBuffer> compared;  // [launch_rows]
};

class Launcher {
 public:
  // Bytes of queries and outputs of fused slices that one launch can bring together.
  static int64_t GatherBytes(const Limits& limits, const kernels::AttentionBackend& backend);
  // Sizes of everything that the backend and the plans need under `limits`.
  static kernels::BackendLimits BackendLimitsOf(const Limits& limits,
                                                const kernels::AttentionBackend& backend);
  // What plans hold of one batch where the backend's cuts are fixed: as many piece rows as packed
  // rows, and one row of all heads at the longest context.
  static PieceBudget PieceBudgetOf(const Limits& limits, const kernels::AttentionBackend& backend);
  // Of any batch within the limits and PieceBudgetOf.
  static PlanCapacity PlanCapacityOf(const Limits& limits,
                                     const kernels::AttentionBackend& backend);
  // Host bytes of the plans and buffers that Create will make.
  static int64_t PlanBytes(const Limits& limits, const kernels::AttentionBackend& backend);

  static absl::StatusOr<std::unique_ptr<Launcher>> Create(const Limits& limits,
                                                          kernels::AttentionBackend* backend,
                                                          kvcache::KvCache* cache,
                                                          ModelTable* models, const Clock* clock);

  // Null when every slot is in flight.
  Launch* FreeSlot();
  // Enqueues and starts launch->batch. On an error nothing runs.
  absl::Status Submit(Launch* launch);
  Launch* oldest() { return inflight_ == 0 ? nullptr : &launches_[oldest_]; }
  bool OldestDone();
  // Blocks until the oldest launch has completed and frees its slot (its batch stays readable until
  // the slot's next Submit). Fills report.kernel_ns.
  absl::Status WaitOldest();
  int32_t inflight() const { return inflight_; }
  const PlanCacheStats& plan_stats() const { return plans_->stats(); }

 private:
  struct Staged {  // device addresses of one request's rows of this launch
    const std::byte* kv = nullptr;
    const std::byte* q = nullptr;
    std::byte* o = nullptr;
    float* lse = nullptr;
    int32_t* differs = nullptr;  // of a repeat
  };

  // What the records of a request's segments have in common: a decode step has a segment for each
  // of its sequences, at every layer.
  struct Common {
    const StreamRequest* request = nullptr;
    Staged staged;
    int32_t expanded_min_rows = 0;  // of EXPANDED: shorter segments take the absorbed form
    int64_t kv_row_bytes = 0, q_row_bytes = 0, o_row_bytes = 0;  // as sent
    kernels::AppendRecord append{};
    kernels::RequestRecord sent{}, latent{};  // by the tensors sent; between the projections
    kernels::ProjectionRecord absorb{}, project{};
    int64_t latent_q_row_bytes = 0, latent_o_row_bytes = 0;
    // Workspace taken and not yet given to a segment.
    std::byte *latent_q = nullptr, *latent_o = nullptr;
    int64_t latent_rows = 0;
  };

  Launcher(const Limits& limits, kernels::AttentionBackend* backend, kvcache::KvCache* cache,
           ModelTable* models, const Clock* clock);
  absl::Status Fill(Launch* launch);
  absl::Status StageKv(const Launch& launch, const StreamRequest& request, Staged* staged);
  // Stages memory for the comparison of repeats with what is stored.
  absl::Status StageComparisons(Launch* launch);
  absl::Status StageQueryAndOutput(const Launch& launch, const StreamRequest& request,
                                   Staged* staged);
  absl::Status StageRequest(Launch* launch, size_t index, Staged* staged);
  // `staged` is of all heads, side by side, in the absorbed form.
  absl::Status StageSlices(Launch* launch, const FusedSlices& slices, Staged* staged);
  absl::Status StageAbsorbedSlices(const Launch& launch, const FusedSlices& slices, Staged* staged);
  absl::Status StageExpandedSlices(Launch* launch, const FusedSlices& slices, Staged* staged);
  absl::Status StageLse(Launch* launch, const FusedSlices& slices, Staged* staged);
  // Stages memory for the log-sum-exps that no client wants, which are checked all the same.
  absl::Status StageUnwantedLse(Launch* launch);
  // Whether no client of these slices wants its log-sum-exps.
  static bool Unwanted(const Launch& launch, const FusedSlices& slices);
  // Takes `rows` rows of `heads` heads of it; where the host reads them goes to `host`.
  static float* TakeUnwantedLse(Launch* launch, int64_t rows, int64_t heads, const float** host);
  // Queries, outputs and log-sum-exps of a run, each in one piece.
  absl::Status StageRun(Launch* launch, const RowRun& run);
  absl::Status StageBatch(Launch* launch);
  Common CommonOf(const Segment& segment, const Staged& staged, const BatchKey& key) const;
  void AddAppend(Launch* launch, const Segment& segment, const Common& common);
  kernels::RequestRecord Record(const Segment& segment) const;
  // Of segment `index` of the batch.
  absl::Status AddCompute(Launch* launch, size_t index, Common* common);
  absl::Status TakeLatents(const Launch& launch, size_t index, Common* common);
  void AddFused(Launch* launch, const Segment& segment);
  absl::Status Plan(Launch* launch);
  absl::Status Enqueue(Launch* launch);
  void Report(Launch* launch);
  kernels::AttentionDesc Desc(const Launch& launch, kernels::AttentionForm form) const;

  const Limits limits_;
  kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  ModelTable* const models_;
  const Clock* const clock_;
  std::unique_ptr<PlanCache> plans_;
  std::vector<Launch> launches_;
  std::vector<Staged> staged_;                // by position in batch.requests
  std::vector<Staged> fused_;                 // by position in batch.slices
  std::vector<bool> in_run_;                  // by position in batch.requests
  std::vector<kernels::InputPart> in_parts_;  // scratch of StageSlices
  std::vector<kernels::OutputPart> out_parts_, lse_parts_;
  std::vector<int32_t> layers_;  // scratch of Report
  std::vector<StreamId> streams_;
  int32_t oldest_ = 0;
  int32_t inflight_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_
