// Streams, steps and launches: every transition of a request from its arrival to its answer.
//
// A step is a transaction: BeginStep decides everything and reserves, EndStep commits, and whatever
// goes wrong in between rolls back the whole. A launch that does not start aborts the steps of its
// own requests. One that fails on the device also aborts the steps of the launches after it.
//
// Ownership: the objects in Parts are borrowed. Threading: the engine role.
#ifndef MLA_SCHEDULER_ENGINE_STEP_MACHINE_H_
#define MLA_SCHEDULER_ENGINE_STEP_MACHINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/batching/ahead_pauses.h"
#include "scheduler/batching/batch_policy.h"
#include "scheduler/clock.h"
#include "scheduler/engine/answer_collector.h"
#include "scheduler/engine/drain_state.h"
#include "scheduler/engine/engine_load.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/launcher.h"
#include "scheduler/limits.h"
#include "scheduler/moves/cache_hints.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/moves/tier_moves.h"
#include "scheduler/stream_steps.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_opener.h"
#include "scheduler/tables/step_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class StepMachine final {
 public:
  // All outlive it; `tiers` null: no slower tiers.
  struct Parts {
    const Clock* clock;
    kernels::AttentionBackend* backend;
    kvcache::KvCache* cache;
    TenantTable* tenants;
    ModelTable* models;
    SequenceTable* sequences;
    StepTable* steps;
    StepOpener* opener;
    Launcher* launcher;
    PageMover* mover;
    TierMoves* tiers;
    CacheHints* hints;
    DrainState* draining;
    AnswerCollector* answers;
    EngineLoad* load;
    EngineStats* stats;
  };
  StepMachine(const Limits& limits, const Parts& parts);

  // --- Streams and requests.
  StreamId OpenStream(const std::string& tenant,
                      std::shared_ptr<const StreamSteps>* steps = nullptr);
  void CloseStream(StreamId stream);
  // Answers the request or queues it. REQUIRES: AnswerCollector has admitted it.
  void Accept(StreamRequest* request);

  // --- Launches. Each returns true if it did anything.
  bool StartLaunch() { return StartLaunch(clock_->Now()); }
  // `now`: the caller's last reading of the clock. It may have waited for launches since, and for
  // nothing else.
  bool StartLaunch(MonotonicNanos now);
  // Returns false if no request waits for a launch: none waits at all, or all wait for others or
  // for time to pass (NextTick).
  bool MayLaunch() const {
    return (!pending_.empty() && !nothing_ready_) || mover_->waiting() ||
           (tiers_ != nullptr && tiers_->ready());
  }
  // Completes the oldest launch. If `wait` is false, it does so only if the launch is done.
  bool CompleteLaunch(bool wait);
  bool inflight() const { return launcher_->inflight() > 0; }
  // Returns true if a request waits for slices of other participants, to go ahead with them. Its
  // tensors may come at any time, and no event says so.
  bool AwaitsSlices() const { return awaits_slices_; }
  // Bound of the work (packed rows x KV rows) that would be launched now; for the decision to
  // launch inline.
  int64_t ReadyWork() const;

  // --- Time. Fails requests that waited too long, and expires leases.
  void Tick();
  // Tells the engine that the process did not run for this time. Messages that clients sent during
  // the pause have yet to be read, so the time does not count against any deadline of theirs. Call
  // it before Tick and Accept.
  void NotePause(int64_t nanos);
  // The next time at which Tick has something to do; max() if there is none.
  MonotonicNanos NextTick() const;

  // Rolls the step back and answers its waiting requests. First completes the running launches that
  // carry it.
  void AbortStep(TenantKey tenant, StepId id, const absl::Status& status);
  int32_t AbortAll(const std::string& why);
  const WaitingRequests& pending() const { return pending_; }
  // Sets the figures that are about streams, steps, waiting requests and plans.
  void AddStats(EngineStats* stats) const;

 private:
  struct Stream {
    std::string tenant;
    TenantRef row;  // empty if the table had no room for a row
    std::shared_ptr<StreamSteps> steps;
    TenantKey key() const { return row ? row->key() : kNoTenant; }
  };

  // --- Steps
  absl::Status BeginStep(StreamRequest* request);
  absl::Status JoinStep(Step* step, StreamRequest* request);
  absl::Status AcceptAttend(StreamRequest* request);
  // Returns OK and sets *wait if the step still has requests; the answer then comes when they are
  // done.
  absl::Status EndStep(StreamRequest* request, bool* wait);
  absl::Status CommitStep(Step* step, StreamRequest* request);
  absl::Status AbortStepRequest(StreamRequest* request);
  void CloseStep(Step* step, const std::string& why_aborted);
  void FinishEndIfIdle(Step* step);
  absl::Status LeaderOf(StreamRequest* request, Step** step);

  // --- Requests
  // Notes in each waiting request whether its tensors have come.
  void NoteTensors();
  // Returns false if a launch may not wait on the device for the tensors of the request, which have
  // not come.
  bool MayGoAhead(const StreamRequest& request) const;
  // For a waiting request that may go ahead: notes in it whether slices of its rows are missing.
  // Returns false if it has waited for them for too long.
  bool HasSlices(StreamRequest* request, MonotonicNanos now);
  static void TakeBackRows(const Batch& batch);
  void ChargeWait(const BatchLaunch& launch);
  // For a request that waits, or that a launch took too early.
  void HandBackUndone(StreamRequest* request, HandedBack why);
  void RemovePending(StreamRequest* request);
  void FailPending(StreamRequest* request, const absl::Status& status);
  void DropRowsFrom(Step* step, int32_t layer, int32_t first);
  void FailWaiting(MonotonicNanos now);  // deadlines and missing KV rows
  void FailLate(StreamRequest* request);
  void FailRowsMissing(StreamRequest* request, int32_t first, int32_t last);
  void FinishLaunch(BatchLaunch* launch);
  void FinishLate(BatchLaunch* launch);
  // FailSubmit undoes only the launch, which did not start. FailOldest undoes a launch that ran and
  // failed, together with the launches after it. Both abort the steps of the requests.
  void FailSubmit(BatchLaunch* launch, const absl::Status& cause);
  void FailOldest(BatchLaunch* launch, const absl::Status& cause);
  // Returns the launch's page work to the queue and adds its requests to `failed`.
  void UndoLaunch(BatchLaunch* launch, const absl::Status& cause,
                  std::vector<StreamRequest*>* failed);
  void AbortFailed(const std::vector<StreamRequest*>& failed, const absl::Status& cause);
  // Share of service of the request's tenant, relative to other tenants.
  int32_t WeightOf(const StreamRequest& request) const {
    return request.tenant != nullptr ? request.tenant->weight()
                                     : tenants_->weight(request.engine.step->tenant);
  }

  const Limits& limits_;
  const Clock* const clock_;
  kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  TenantTable* const tenants_;
  ModelTable* const models_;
  SequenceTable* const sequences_;
  StepTable* const steps_;
  StepOpener* const opener_;
  Launcher* const launcher_;
  PageMover* const mover_;
  TierMoves* const tiers_;
  CacheHints* const hints_;
  DrainState* const draining_;
  AnswerCollector* const answers_;
  EngineLoad* const load_;
  EngineStats* const stats_;
  BatchPolicy policy_;
  WaitingRequests pending_;
  AheadPauses ahead_pauses_;
  absl::flat_hash_map<StreamId, Stream> streams_;
  StreamId next_stream_ = 1;
  bool awaits_slices_ = false;
  MonotonicNanos completed_at_ = 0;  // when the wait for a launch last ended
  bool nothing_ready_ = false;       // StartLaunch found nothing ready, and nothing has come since
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_STEP_MACHINE_H_
