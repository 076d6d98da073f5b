// Launches from the choice of their requests to the answers, and what a failed one takes with it.
//
// A launch that does not start aborts the steps of its own requests. One that fails on the device
// also aborts the steps of the launches after it.
//
// Ownership: borrows the objects of StepParts. Threading: the engine role.
#ifndef MLA_SCHEDULER_STEPS_LAUNCHES_H_
#define MLA_SCHEDULER_STEPS_LAUNCHES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/steps/launch_queue.h"
#include "scheduler/steps/step_ends.h"
#include "scheduler/steps/step_parts.h"

namespace mla::scheduler {

class Launches final {
 public:
  // `ends` and `queue` outlive it.
  Launches(const StepParts& parts, StepEnds* ends, LaunchQueue* queue)
      : clock_(parts.clock),
        backend_(parts.backend),
        cache_(parts.cache),
        steps_(parts.steps),
        launcher_(parts.launcher),
        mover_(parts.mover),
        tiers_(parts.tiers),
        answers_(parts.answers),
        load_(parts.load),
        stats_(parts.stats),
        ends_(ends),
        queue_(queue) {}

  // Start and Complete return true if they did anything.
  bool Start() { return Start(clock_->Now()); }
  // `now` is the caller's last reading of the clock. Since that reading the caller may have waited
  // for launches, but for nothing else.
  bool Start(MonotonicNanos now);
  // Returns false if no request waits for a launch: none waits at all, or all wait for others or
  // for time to pass (StepMachine::NextTick).
  bool MayStart() const {
    return (!queue_->empty() && !nothing_ready_) || mover_->waiting() ||
           (tiers_ != nullptr && tiers_->ready());
  }
  // Tells that a request has come, which may be ready.
  void NoteArrival() { nothing_ready_ = false; }
  // Completes the oldest launch. If `wait` is false, it does so only if the launch is done.
  bool Complete(bool wait);
  bool inflight() const { return launcher_->inflight() > 0; }

  // Rolls the step back and answers its waiting requests. First completes the running launches that
  // carry it.
  void AbortStep(TenantKey tenant, StepId id, const absl::Status& status);

 private:
  static void TakeBackRows(const Batch& batch);
  void Finish(BatchLaunch* launch);
  void FinishLate(BatchLaunch* launch);
  void CountFinished(const LaunchReport& report);
  // FailSubmit undoes only the launch, which did not start. FailOldest undoes a launch that ran and
  // failed, together with the launches after it. Both abort the steps of the requests.
  void FailSubmit(BatchLaunch* launch, const absl::Status& cause);
  void FailOldest(BatchLaunch* launch, const absl::Status& cause);
  // Returns the launch's page work to the queue and adds its requests to `failed`.
  void Undo(BatchLaunch* launch, const absl::Status& cause, std::vector<StreamRequest*>* failed);
  void AbortFailed(const std::vector<StreamRequest*>& failed, const absl::Status& cause);

  const Clock* const clock_;
  kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  StepTable* const steps_;
  Launcher* const launcher_;
  PageMover* const mover_;
  TierMoves* const tiers_;
  AnswerCollector* const answers_;
  EngineLoad* const load_;
  EngineStats* const stats_;
  StepEnds* const ends_;
  LaunchQueue* const queue_;
  MonotonicNanos completed_at_ = 0;  // when the wait for a launch last ended
  bool nothing_ready_ = false;       // Start found nothing ready, and nothing has come since
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_LAUNCHES_H_
