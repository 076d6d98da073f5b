// Turns batches into launches of the backend: places tensors, builds records, gets the plans and
// submits. Slots are used in turn, so results come back in the order of submission.
//
// Threading: owned by the engine role. A launch allocates nothing.
#ifndef MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_
#define MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/launching/record_builder.h"
#include "scheduler/launching/tensor_stager.h"
#include "scheduler/limits.h"
#include "scheduler/planning/cache/plan_cache.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {

// Returns the number of keys that a query row sees, averaged over the rows and heads of `records`;
// 0 if there are no rows.
int64_t MeanSeenKeys(std::span<const kernels::SegmentRecord> records);

class Launcher {
 public:
  // REQUIRES: the backend is configured. `page_tables` are the tables that `cache` writes; all
  // arguments outlive the launcher.
  static absl::StatusOr<std::unique_ptr<Launcher>> Create(
      const Limits& limits, kernels::AttentionBackend* backend, kvcache::KvCache* cache,
      std::span<const uint32_t> page_tables, const ModelTable* models, const Clock* clock);

  // Returns null if every slot is in flight.
  BatchLaunch* FreeSlot();
  // Starts the launch of launch->batch, chosen from the time `chosen_from` on. On an error nothing
  // runs.
  absl::Status Submit(BatchLaunch* launch, MonotonicNanos chosen_from);
  BatchLaunch* oldest() { return inflight_ == 0 ? nullptr : &launches_[oldest_]; }
  // Returns true if a launch may be waiting on the device for work of this client.
  bool AwaitsClient(StreamId client) const;
  bool OldestDone();
  // Waits until the oldest launch has completed, then frees its slot. Its batch may still be read
  // until the slot's next Submit. Fills report.kernel_ns.
  absl::Status WaitOldest();
  int32_t inflight() const { return inflight_; }
  const PlanCacheStats& plan_stats() const { return plans_->stats(); }

 private:
  Launcher(const Limits& limits, kernels::AttentionBackend* backend, kvcache::KvCache* cache,
           std::span<const uint32_t> page_tables, const ModelTable* models, const Clock* clock);
  absl::Status Plan(BatchLaunch* launch);
  // Plans all rows in the absorbed form, which does not need rounds. It is called if the expanded
  // form needs more rounds than a plan holds.
  absl::Status PlanAbsorbedAlone(BatchLaunch* launch);
  absl::Status PlanRecords(FormRecords& form, BatchLaunch* launch,
                           kernels::AttentionParams* params);
  // Sets `launch->launch` from the finished records and plans.
  void Assemble(BatchLaunch* launch) const;
  void Report(BatchLaunch* launch);
  kernels::AttentionDesc Desc(const BatchKey& key, kernels::AttentionForm form) const;

  kernels::AttentionBackend* const backend_;
  const std::span<const uint32_t> page_tables_;
  const Clock* const clock_;
  const int64_t ahead_ns_;  // how long a launch may wait for a client's work
  TensorStager stager_;
  RecordBuilder records_;
  std::unique_ptr<PlanCache> plans_;
  std::vector<BatchLaunch> launches_;
  std::vector<int32_t> layers_;  // scratch of Report
  std::vector<StreamId> streams_;
  int32_t oldest_ = 0;
  int32_t inflight_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_LAUNCHER_H_
