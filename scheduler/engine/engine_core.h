// The engine without threads: all scheduler and cache state and all its transitions, in a form that
// one thread can step by hand. Engine (engine.h) adds the inbox, the role and the dedicated thread.
//
// A step is a transaction: BeginStep decides everything and reserves, EndStep commits, and whatever
// goes wrong in between rolls back the whole. A launch that does not start aborts the steps of its
// own requests. One that fails on the device also aborts the steps of the launches after it.
//
// Threading: one thread at a time; asserted by the caller (Engine holds the role).
#ifndef MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_
#define MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/batching/ahead_pauses.h"
#include "scheduler/batching/batch.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/engine/answer_queue.h"
#include "scheduler/engine/engine_load.h"
#include "scheduler/engine/row_transfers.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/launcher.h"
#include "scheduler/moves/cache_hints.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/moves/tier_moves.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_opener.h"
#include "scheduler/tables/step_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

// Reports of the launches that ended while the role was held once, for one call of the observer.
struct LaunchReports {
  static constexpr int kMost = 2;
  int count = 0;
  std::array<LaunchReport, kMost> items;
};

class EngineCore {
 public:
  // `ids` yields sequence ids.
  static absl::StatusOr<std::unique_ptr<EngineCore>> Create(
      const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
      const Clock* clock, std::function<uint64_t()> ids);
  ~EngineCore();

  // --- Streams and requests.
  StreamId OpenStream(const std::string& tenant,
                      std::shared_ptr<const StreamSteps>* steps = nullptr);
  void CloseStream(StreamId stream);
  // Answers the request or queues it. REQUIRES: engine.arrival_ns and first_arrival_ns are set.
  void Accept(StreamRequest* request);

  // --- Launches. Each returns true if it did anything.
  bool StartLaunch();
  // Returns false if no request waits for a launch: none waits at all, or all wait for others or
  // for time to pass (NextTick).
  bool MayLaunch() const {
    return (!pending_.empty() && !nothing_ready_) || mover_->waiting() ||
           (tiers_ != nullptr && tiers_->ready());
  }
  // Completes the oldest launch. If `wait` is false, it does so only if the launch is done.
  bool CompleteLaunch(bool wait);
  bool inflight() const { return launcher_->inflight() > 0; }
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

  // --- Control plane; see engine.h.
  TenantTable& tenants() { return tenants_; }
  // Shared, because transports may return staged bytes after the engine is gone.
  const std::shared_ptr<TenantTable>& shared_tenants() const { return tenant_table_; }
  const std::shared_ptr<kvcache::EventLog>& events() const { return events_; }
  TenantKey FindTenant(const std::string& name) const { return tenants_.Find(name); }
  ModelTable& models() { return *models_; }
  absl::StatusOr<SequenceInfo> OpenSequence(const OpenArgs& args, const PrefixPlan& prefix = {});
  // Makes a plan for the sequence as it is now; the caller fills it without the role.
  absl::StatusOr<PrefixPlan> PlanMatch(const MatchArgs& args, int64_t* committed);
  // Returns ABORTED if the sequence has changed since the plan was made.
  absl::StatusOr<SequenceInfo> MatchSequence(const MatchArgs& args, const PrefixPlan& prefix);
  absl::StatusOr<SequenceInfo> ForkSequence(const ForkArgs& args);
  absl::StatusOr<SequenceInfo> TruncateSequence(const std::string& tenant, SequenceId id,
                                                int64_t length, uint64_t expected_epoch);
  SequenceList GetSequences(const SequenceSelection& selection);
  absl::StatusOr<SequenceTail> ReadTail(const std::string& tenant, SequenceId id,
                                        uint64_t expected_epoch);
  int32_t ReleaseSequences(const std::string& tenant, std::span<const SequenceId> ids,
                           std::vector<SequenceId>* not_found);
  // `prefix`: the plan for args.prefix, if args.prefix names the rows.
  absl::StatusOr<HintAnswer> Hint(const HintArgs& args, const PrefixPlan& prefix);
  // --- Slower tiers; null if there are none.
  TierMoves* tiers() { return tiers_.get(); }
  std::span<std::byte> tier_memory() { return tier_memory_->bytes(); }
  // Brings back the call's rows that are in slower tiers. Returns an error instead if the call
  // would be refused. Returns null if there is nothing to wait for.
  absl::StatusOr<std::shared_ptr<TierWait>> RestoreForOpen(const OpenArgs& args,
                                                           const PrefixPlan& prefix);
  absl::StatusOr<std::shared_ptr<TierWait>> RestoreForMatch(const MatchArgs& args,
                                                            const PrefixPlan& prefix);
  // As RestoreForMatch, for the plan's rows from `first_row` on.
  std::shared_ptr<TierWait> RestorePrefix(const std::string& tenant, const PrefixPlan& prefix,
                                          int64_t first_row);
  // --- Exports and imports.
  RowTransfers& transfers() { return *transfers_; }
  // As transfers().BeginImport, but refuses while the server drains.
  absl::StatusOr<MovingPages> BeginImport(const ImportArgs& args);
  // Answers all moves that wait.
  void FailMoves(const std::string& why);
  int32_t RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                      std::vector<SequenceId>* not_found);
  int32_t EvictSequences(const SequenceSelection& selection, std::vector<SequenceId>* not_found);
  absl::StatusOr<int32_t> EvictModel(const std::string& tenant, const std::string& id);
  void StartDrain(const std::string& peer = "") {
    draining_ = true;
    load_.NoteDraining(true);
    drain_peer_ = peer;
  }
  void CancelDrain() {
    draining_ = false;
    load_.NoteDraining(false);
  }
  bool draining() const { return draining_; }
  int32_t AbortAllSteps(const std::string& why);
  EngineStats Stats() const;
  kernels::AttentionBackend& backend() { return *backend_; }
  const Limits& limits() const { return limits_; }
  void SetDefaultLeases(const DefaultLeases& leases) {
    sequences_->set_default_lease_ms(leases.sequence_ms);
    models_->set_default_lease_ms(leases.model_ms);
    opener_->set_default_lease_ms(leases.step_ms);
  }
  const kvcache::KvCache& cache() const { return *cache_; }
  std::span<uint32_t> page_tables();
  const WaitingRequests& pending() const { return pending_; }
  // From this call on, answers are collected for TakeAnswers; before it, Done is called at once.
  void CollectAnswers() { collects_answers_ = true; }
  bool has_answers() const { return !answers_.empty(); }
  // The answers since the last call, in the order in which they were given. The caller must call
  // Done for them.
  AnswerList TakeAnswers() { return std::exchange(answers_, {}); }
  // Reports of the launches that have ended since the last call. The caller passes them to the
  // observer once it has delivered the answers: metrics cost as much as a small reply.
  LaunchReports TakeReports() {
    LaunchReports taken;
    taken.count = std::exchange(reports_.count, 0);
    std::copy_n(reports_.items.begin(), taken.count, taken.items.begin());
    return taken;
  }
  // Counts a request that is about to be handed over, or refuses it: RESOURCE_EXHAUSTED when the
  // tenant or the server has as many as it may. Any thread.
  absl::Status Admit(StreamRequest* request);
  // Requests handed over and not yet answered; the caller counts a request before it hands it over.
  // Any thread.
  std::atomic<int32_t>& owned() { return owned_; }
  int32_t owned() const { return owned_; }
  // Any thread may read it. NoteLoad brings it up to date; only the engine role may call that.
  const EngineLoad& load() const { return load_; }
  void NoteLoad() {
    const kvcache::KvCacheStats cache = cache_->stats();
    load_.NotePool(cache.bytes_total, cache.bytes_total - cache.bytes_used, cache.bytes_cached);
  }

 private:
  struct Stream {
    std::string tenant;
    TenantRef row;  // empty if the table had no room for a row
    std::shared_ptr<StreamSteps> steps;
    TenantKey key() const { return row ? row->key() : kNoTenant; }
  };

  EngineCore(const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
             const Clock* clock);

  absl::Status MakeTiers();
  // The model of a sequence that may be opened now, or the error.
  absl::StatusOr<Model*> ModelToOpen(const OpenArgs& args, const PrefixPlan& prefix);

  // --- Steps
  absl::Status BeginStep(StreamRequest* request);
  absl::Status JoinStep(Step* step, StreamRequest* request);
  // The error of calls during a drain: calls that open a sequence (`opens`), or that name sequences
  // still on this server. RefuseDraining reports instead that a named sequence has moved, if one
  // has, because the client can then continue on the other server.
  absl::Status DrainingError(bool opens) const;
  absl::Status RefuseDraining(TenantKey tenant, SequenceId id, const std::string& field);
  absl::Status RefuseDraining(TenantKey tenant, const BeginStepArgs& args);
  absl::Status AcceptAttend(StreamRequest* request);
  // Returns OK and sets *wait if the step still has requests; the answer then comes when they are
  // done.
  absl::Status EndStep(StreamRequest* request, bool* wait);
  absl::Status CommitStep(Step* step, StreamRequest* request);
  void EvictSequence(Sequence* sequence, const char* why);
  void Preempt(Sequence* sequence);
  absl::Status AbortStepRequest(StreamRequest* request);
  // Rolls the step back and answers its waiting requests. First completes the running launches that
  // carry it.
  void AbortStep(TenantKey tenant, StepId id, const absl::Status& status);
  void CloseStep(Step* step, const std::string& why_aborted);
  void FinishEndIfIdle(Step* step);
  absl::Status LeaderOf(StreamRequest* request, Step** step);

  // --- Requests
  void Answer(StreamRequest* request, const absl::Status& status);
  void AnswerAt(MonotonicNanos now, StreamRequest* request, const absl::Status& status);
  // As Answer, without one.
  void HandBack(StreamRequest* request, HandedBack why);
  void Return(StreamRequest* request, const absl::Status& status);
  // Returns false if the request's tensors have not come and a launch may not wait for them. Notes
  // in the request whether they have come.
  bool MayGoAhead(StreamRequest* request) const;
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
  void NoteReport(const LaunchReport& report);
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
                                     : tenants_.weight(request.engine.step->tenant);
  }

  const EngineOptions options_;
  const Limits& limits_;
  const Clock* const clock_;
  std::unique_ptr<kernels::AttentionBackend> backend_;
  std::unique_ptr<kernels::HostBuffer> page_tables_;  // for all sequences; written by the cache
  std::unique_ptr<kernels::HostBuffer> tier_memory_;  // null: no slower tiers
  const std::shared_ptr<kvcache::EventLog> events_;   // readers may outlive the engine
  std::unique_ptr<kvcache::KvCache> cache_;
  const std::shared_ptr<TenantTable> tenant_table_;
  TenantTable& tenants_;
  std::unique_ptr<ModelTable> models_;
  std::unique_ptr<SequenceTable> sequences_;
  std::unique_ptr<StepTable> steps_;
  std::unique_ptr<StepOpener> opener_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<PageMover> mover_;
  std::unique_ptr<TierMoves> tiers_;  // null: no slower tiers
  std::unique_ptr<CacheHints> hints_;
  std::unique_ptr<RowTransfers> transfers_;
  BatchPolicy policy_;
  WaitingRequests pending_;
  AheadPauses ahead_pauses_;
  absl::flat_hash_map<StreamId, Stream> streams_;
  StreamId next_stream_ = 1;
  bool nothing_ready_ = false;  // StartLaunch found nothing ready, and nothing has come since
  bool draining_ = false;
  std::string drain_peer_;  // server that takes over the sequences; empty: none
  bool collects_answers_ = false;
  EngineLoad load_;
  LaunchReports reports_;
  AnswerList answers_;
  std::atomic<int32_t> owned_{0};
  EngineStats stats_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_
