// Holds the requests that wait for a launch. Finds the requests that may be launched, and the ones
// that have waited for too long.
//
// Ownership: borrows the objects of StepParts; requests stay the transport's until they are
// answered. Threading: the engine role.
#ifndef MLA_SCHEDULER_STEPS_LAUNCH_QUEUE_H_
#define MLA_SCHEDULER_STEPS_LAUNCH_QUEUE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "scheduler/batching/ahead_pauses.h"
#include "scheduler/batching/batch_policy.h"
#include "scheduler/batching/waiting_requests.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/steps/step_ends.h"
#include "scheduler/steps/step_parts.h"

namespace mla::scheduler {

class LaunchQueue final {
 public:
  // `ends` outlives it.
  LaunchQueue(const StepParts& parts, StepEnds* ends);

  // --- Requests. engine.step is set and has accepted their rows.
  void Add(StreamRequest* request);
  // Queues the rest of a request whose first rows a launch has computed.
  void Return(StreamRequest* request);
  // Takes the request out without an answer.
  void Remove(StreamRequest* request);
  // Takes out the requests of the step, which is being aborted, and answers them.
  void Abort(Step* step, const absl::Status& answer);
  // Hands a request back that is not in the queue and whose rows are not stored, and drops later
  // rows of its step.
  void HandBack(StreamRequest* request, HandedBack why);
  bool empty() const { return pending_.empty(); }
  StreamRequest* front() const { return pending_.front(); }

  // --- Launches.
  // Moves the work of the next launch into `batch` (BatchPolicy::Choose).
  void Choose(MonotonicNanos now, Batch* batch);
  // Charges a launch's wait for its client to the tenant: it kept others from the device.
  void ChargeWait(const BatchLaunch& launch);
  BatchPolicy& policy() { return policy_; }
  AheadPauses& ahead_pauses() { return ahead_pauses_; }
  // Returns false if a launch may not wait on the device for the tensors of the tenant's request,
  // which have not come.
  bool MayGoAhead(const StreamRequest& request, TenantKey tenant) const;
  // Returns true if a request waits for slices of other participants, to go ahead with them. Its
  // tensors may come at any time, and no event says so.
  bool AwaitsSlices() const { return awaits_slices_; }
  // Returns the bound of the work (packed rows x KV rows) that would be launched now; for the
  // decision to launch inline.
  int64_t ReadyWork() const;

  // --- Time.
  // Fails requests whose deadline has passed or whose KV rows have not come, and hands back those
  // that may not go ahead any more.
  void FailWaiting(MonotonicNanos now);
  // Adds a pause of the process to the time that requests may wait for KV rows.
  void NotePause(int64_t nanos);
  // Returns when FailWaiting has something to do next; max() if there is nothing.
  MonotonicNanos NextDeadline() const;
  // Sets the figures about requests that wait.
  void AddStats(EngineStats* stats) const;

 private:
  // Notes in each request whether its tensors have come.
  void NoteTensors();
  // Notes in a request that may go ahead whether slices of its rows are missing. Returns false if
  // it has waited for them for too long.
  bool HasSlices(StreamRequest* request, MonotonicNanos now);
  void Fail(StreamRequest* request, const absl::Status& status);
  void FailLate(StreamRequest* request);
  void FailRowsMissing(StreamRequest* request, int32_t first, int32_t last);
  void DropRowsFrom(Step* step, int32_t layer, int32_t first);
  // Returns the share of service of the request's tenant, relative to other tenants.
  int32_t WeightOf(const StreamRequest& request) const {
    return request.tenant != nullptr ? request.tenant->weight()
                                     : tenants_->weight(request.engine.step->tenant);
  }

  const Limits& limits_;
  const Clock* const clock_;
  kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  TenantTable* const tenants_;
  Launcher* const launcher_;
  AnswerCollector* const answers_;
  StepEnds* const ends_;
  BatchPolicy policy_;
  WaitingRequests pending_;
  AheadPauses ahead_pauses_;
  bool awaits_slices_ = false;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_LAUNCH_QUEUE_H_
