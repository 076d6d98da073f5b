#include "scheduler/engine/step_machine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/batching/gated_requests.h"
#include "scheduler/launching/launch_sizes.h"
#include "scheduler/launching/result_check.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMilli = 1'000'000;
constexpr int64_t kNanosPerMicro = 1'000;
// Requests that ReadyWork looks at before it calls the work large.
constexpr int kReadyWorkRequests = 64;

absl::Status MoveFailed(const absl::Status& cause) {
  return MakeError(absl::StatusCode::kInternal,
                   absl::StrCat("the launch that moved rows failed: ", cause.message()),
                   {.reason = "launch_failed"});
}

}  // namespace

StepMachine::StepMachine(const Limits& limits, const Parts& parts)
    : limits_(limits),
      clock_(parts.clock),
      backend_(parts.backend),
      cache_(parts.cache),
      tenants_(parts.tenants),
      models_(parts.models),
      sequences_(parts.sequences),
      steps_(parts.steps),
      opener_(parts.opener),
      launcher_(parts.launcher),
      mover_(parts.mover),
      tiers_(parts.tiers),
      hints_(parts.hints),
      draining_(parts.draining),
      answers_(parts.answers),
      load_(parts.load),
      stats_(parts.stats),
      policy_(limits, GatherBytes(limits, *backend_), PieceBudgetOf(limits, *backend_)) {
  policy_.ExpectRate(backend_->Info().nanos_per_kv_byte);
  // Staging copies can merge rows at no extra cost.
  if (!backend_->Info().unified_memory) policy_.FormRuns();
}

StreamId StepMachine::OpenStream(const std::string& tenant,
                                 std::shared_ptr<const StreamSteps>* steps) {
  const StreamId id = next_stream_++;
  absl::StatusOr<TenantRef> row = tenants_->Enter(tenant);
  auto open = std::make_shared<StreamSteps>();
  if (steps != nullptr) *steps = open;
  streams_.emplace(id, Stream{tenant, row.ok() ? *row : TenantRef(), std::move(open)});
  return id;
}

void StepMachine::CloseStream(StreamId stream) {
  bool changed = true;
  while (changed) {
    changed = false;
    for (Step* step : steps_->open()) {
      if (!step->Includes(stream)) continue;
      const bool leader = step->streams[0] == stream;
      AbortStep(step->tenant, step->id,
                absl::CancelledError(leader ? "the stream that began the step has closed"
                                            : "a participant's stream has closed"));
      changed = true;  // The walk starts again, because the list of open steps has changed.
      break;
    }
  }
  streams_.erase(stream);
  models_->StreamClosed(stream);
}

void StepMachine::Accept(StreamRequest* request) {
  absl::Status status;
  bool wait = false;
  nothing_ready_ = false;
  if (!streams_.contains(request->stream)) {
    answers_->Answer(request, absl::CancelledError("the stream is closed"));
    return;
  }
  switch (request->kind) {
    case RequestKind::kBeginStep:
      // Timers may be late, so leases that have run out are ended first.
      stats_->leases_expired += sequences_->ExpireLeases();
      status = BeginStep(request);
      break;
    case RequestKind::kAttend:
      if (request->attend.ready.word != nullptr) {
        // Waiting requests go first: a request that goes ahead is launched alone, or handed back.
        if (MayLaunch()) StartLaunch();
        nothing_ready_ = false;
        request->engine.ahead = !request->attend.ready.Reached();
        if (request->engine.ahead && !MayGoAhead(*request)) {
          return answers_->HandBack(request, HandedBack::kBusy);
        }
      }
      status = AcceptAttend(request);
      wait = status.ok();
      // Requests with earlier rows may be on their way back to the client, which then resends this
      // one after them.
      if (!status.ok() && request->attend.ready.word != nullptr &&
          DetailOf(status).reason == "rows_out_of_order") {
        return answers_->HandBack(request, HandedBack::kBusy);
      }
      break;
    case RequestKind::kEndStep:
      status = EndStep(request, &wait);
      break;
    case RequestKind::kAbortStep:
      status = AbortStepRequest(request);
      break;
  }
  if (!wait) answers_->Answer(request, status);
}

absl::Status StepMachine::JoinStep(Step* step, StreamRequest* request) {
  if (!SameStep(*step, request->begin)) {
    return RefuseField("begin_step.step_id", absl::StrCat(request->step_id),
                       "a new id, or a repeat of the same BeginStep", "step_exists",
                       absl::StatusCode::kAlreadyExists);
  }
  if (!step->Includes(request->stream)) {
    if (static_cast<int32_t>(step->streams.size()) >= step->participants) {
      return RefuseField("begin_step.participants", "one more stream",
                         absl::StrCat(step->participants, " streams, which have all joined"),
                         "step_full", absl::StatusCode::kFailedPrecondition);
    }
    step->ranks[step->streams.size()] = StepRank();
    step->streams.push_back(request->stream);
  }
  models_->NoteStream(step->model, request->stream);
  streams_.at(request->stream)
      .steps->Add(step->id, {step->model->spec, step->total_rows, request->begin.positions});
  StepTable::Touch(step, request->engine.arrival_ns);
  request->total_rows = step->total_rows;
  request->lease_ms = step->lease_ns / kNanosPerMilli;
  request->joined = static_cast<int32_t>(step->streams.size());
  return absl::OkStatus();
}

absl::Status StepMachine::BeginStep(StreamRequest* request) {
  Stream& stream = streams_.at(request->stream);
  if (!stream.row) {
    MLA_ASSIGN_OR_RETURN(TenantRef row, tenants_->Enter(stream.tenant));
    stream.row = std::move(row);
  }
  const TenantKey tenant = stream.key();
  if (request->begin.participants == 0) request->begin.participants = 1;
  Step* existing = steps_->Lookup(tenant, request->step_id);
  if (existing != nullptr) return JoinStep(existing, request);

  if (draining_->on()) return draining_->Refuse(tenant, request->begin);
  MLA_ASSIGN_OR_RETURN(Step* const step, opener_->Open(tenant, *request));
  return JoinStep(step, request);
}

absl::Status StepMachine::AcceptAttend(StreamRequest* request) {
  const Stream& stream = streams_.at(request->stream);
  absl::StatusOr<Step*> step_or = steps_->Find(stream.key(), request->stream, request->step_id);
  if (!step_or.ok()) {
    request->step_aborted = absl::IsAborted(step_or.status());
    return step_or.status();
  }
  Step* step = *step_or;
  StepTable::Touch(step, request->engine.arrival_ns);
  AttendArgs& args = request->attend;
  StreamRequest::EngineFields& note = request->engine;
  MLA_RETURN_IF_ERROR(CheckAttend(*step, args, &note.repeat));
  if (args.has_kv && !note.repeat) {
    LayerProgress& layer = step->layers[args.layer];
    layer.accepted += args.row_count;
    layer.writer_head = args.head_offset;
    HeadSliceTable::RowsAccepted(*step, args.layer, note.arrival_ns);
  }
  note.step = step;
  note.blocked_since_ns = note.arrival_ns;
  note.deadline_ns = note.arrival_ns + limits_.queue_ms * kNanosPerMilli;
  if (args.timeout_us > 0) {
    note.deadline_ns =
        std::min(note.deadline_ns, note.first_arrival_ns + args.timeout_us * kNanosPerMicro);
  }
  request->timings = RequestTimings();
  ++step->waiting;
  pending_.Add(request, WeightOf(*request));
  policy_.slices().Join(request);
  return absl::OkStatus();
}

absl::Status StepMachine::LeaderOf(StreamRequest* request, Step** step) {
  const Stream& stream = streams_.at(request->stream);
  absl::StatusOr<Step*> step_or = steps_->Find(stream.key(), request->stream, request->step_id);
  if (!step_or.ok()) {
    request->step_aborted = absl::IsAborted(step_or.status());
    return step_or.status();
  }
  *step = *step_or;
  if ((*step)->streams[0] == request->stream) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   "only the stream that began the step may end or abort it",
                   {.field = "step_id",
                    .got = absl::StrCat(request->step_id),
                    .limit = "a step that this stream began",
                    .reason = "not_the_leader"});
}

absl::Status StepMachine::EndStep(StreamRequest* request, bool* wait) {
  Step* step = nullptr;
  absl::Status status = LeaderOf(request, &step);
  if (!status.ok()) return status;
  StepTable::Touch(step, request->engine.arrival_ns);
  if (step->end != nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     "the step's EndStep was sent before and waits for its requests",
                     {.field = "step_id",
                      .got = absl::StrCat(request->step_id),
                      .limit = "a step without an EndStep under way",
                      .reason = "step_ending"});
  }
  const auto sequences = static_cast<int64_t>(step->entries.size());
  if (sequences > request->end.lengths_max) {
    return RefuseField("end_step.lengths", absl::StrCat("room for ", request->end.lengths_max),
                       absl::StrCat("room for the lengths of ", sequences, " sequences"),
                       "reply_too_large");
  }
  const std::vector<int32_t>& committed = request->end.committed_rows;
  if (!committed.empty() && committed.size() != step->entries.size()) {
    return RefuseField("end_step.committed_rows", absl::StrCat(committed.size(), " entries"),
                       absl::StrCat("none or ", step->entries.size()), "out_of_range");
  }
  for (size_t i = 0; i < committed.size(); ++i) {
    if (committed[i] >= 0 && committed[i] <= step->entries[i].rows) continue;
    return RefuseField(absl::StrCat("end_step.committed_rows[", i, "]"), absl::StrCat(committed[i]),
                       absl::StrCat("0..", step->entries[i].rows), "out_of_range");
  }
  status = CheckTails(*step, request->end.tails);
  if (!status.ok()) return status;
  if (!step->idle()) {
    step->end = request;
    request->engine.state.Enter(RequestState::kEnding);
    *wait = true;
    return absl::OkStatus();
  }
  return CommitStep(step, request);
}

absl::Status StepMachine::CommitStep(Step* step, StreamRequest* request) {
  const std::vector<int32_t>& committed = request->end.committed_rows;
  int32_t needed = 0;
  for (size_t i = 0; i < step->entries.size(); ++i) {
    const StepEntry& entry = step->entries[i];
    const int32_t rows = committed.empty() ? entry.rows : committed[i];
    if (rows > 0) needed = entry.offset + rows;
  }
  const std::string missing = MissingRows(*step, needed);
  if (!missing.empty()) {
    int32_t stored = needed;
    for (const LayerProgress& layer : step->layers) stored = std::min(stored, layer.stored);
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("step ", step->id, " cannot be committed, KV rows are missing: ", missing),
        {.field = "end_step",
         .got = missing,
         .limit = "every layer has the rows to be committed",
         .reason = "rows_missing",
         .last_good_position = CommittedAt(*step, stored)});
  }
  request->lengths.clear();
  for (size_t i = 0; i < step->entries.size(); ++i) {
    const StepEntry& entry = step->entries[i];
    if (entry.sequence->not_finite_from != Sequence::kNoRow) {
      // Rows that are not finite are not shared with other sequences.
      const int64_t from =
          std::min<int64_t>(entry.sequence->not_finite_from, limits_.max_sequence_rows);
      cache_->Undeclare(entry.sequence->slot, static_cast<int32_t>(from));
    }
    const int32_t rows = committed.empty() ? entry.rows : committed[i];
    cache_->Commit(entry.sequence->slot, rows);
    const int64_t length = cache_->length(entry.sequence->slot);
    entry.sequence->ForgetRowsFrom(length);
    request->lengths.push_back(length);
  }
  for (TailArgs& args : request->end.tails) {
    const auto place = static_cast<size_t>(args.sequence);
    // The request keeps the old tail, so it is freed outside the role: freeing takes a while.
    step->entries[place].sequence->SwapTail(request->lengths[place], &args.tail);
  }
  CloseStep(step, "");
  return absl::OkStatus();
}

void StepMachine::CloseStep(Step* step, const std::string& why_aborted) {
  for (const StepEntry& entry : step->entries) {
    entry.sequence->step = nullptr;
    sequences_->Renew(entry.sequence);
  }
  for (const StreamId stream : step->streams) streams_.at(stream).steps->Remove(step->id);
  steps_->Remove(step, why_aborted);
}

void StepMachine::FinishEndIfIdle(Step* step) {
  if (step->end == nullptr || !step->idle() || step->failed) return;
  StreamRequest* request = std::exchange(step->end, nullptr);
  const absl::Status status = CommitStep(step, request);
  answers_->Answer(request, status);
}

absl::Status StepMachine::AbortStepRequest(StreamRequest* request) {
  Step* step = nullptr;
  MLA_RETURN_IF_ERROR(LeaderOf(request, &step));
  AbortStep(step->tenant, step->id, absl::AbortedError("the client aborted it"));
  return absl::OkStatus();
}

void StepMachine::AbortStep(TenantKey tenant, StepId id, const absl::Status& status) {
  Step* step = steps_->Lookup(tenant, id);
  // A launch in flight reads the step's pages; its rows may only be given back afterwards.
  // Completing it may end or abort the step, so look the step up again.
  if (step != nullptr && step->inflight > 0) {
    while (CompleteLaunch(/*wait=*/true)) {
    }
    step = steps_->Lookup(tenant, id);
  }
  if (step == nullptr) return;
  const absl::Status answer =
      MakeError(status.code(), absl::StrCat("step ", id, " was aborted: ", status.message()),
                {.field = "step_id",
                 .got = absl::StrCat(id),
                 .limit = "an open step",
                 .reason = "step_aborted",
                 .last_good_position = CommittedAt(*step, 0)});
  StreamRequest* request = pending_.front();
  while (request != nullptr) {
    StreamRequest* const next = WaitingRequests::Next(request);
    if (request->engine.step == step) {
      RemovePending(request);
      request->step_aborted = true;
      answers_->Answer(request, answer);
    }
    request = next;
  }
  if (step->end != nullptr) {
    step->end->step_aborted = true;
    answers_->Answer(std::exchange(step->end, nullptr), answer);
  }
  for (const StepEntry& entry : step->entries) {
    cache_->Rollback(entry.sequence->slot);
    entry.sequence->ForgetRowsFrom(entry.start);
  }
  ++stats_->steps_aborted;
  CloseStep(step, std::string(status.message()));
}

int32_t StepMachine::AbortAll(const std::string& why) {
  int32_t aborted = 0;
  while (!steps_->open().empty()) {
    Step* step = steps_->open().front();
    AbortStep(step->tenant, step->id, absl::AbortedError(why));
    ++aborted;
  }
  return aborted;
}

// ---------------------------------------------------------------------------------------- Launches

bool StepMachine::StartLaunch(MonotonicNanos now) {
  const bool moved = tiers_ != nullptr && tiers_->Pump();
  BatchLaunch* launch = launcher_->FreeSlot();
  if (launch == nullptr) return moved;
  now = std::max(now, completed_at_);
  FailWaiting(now);
  policy_.Choose(pending_, cache_->work(), now, launch->batch);
  if (launch->batch.gated) TakeBackRows(launch->batch);
  mover_->Take(policy_, &launch->batch);
  // Groups that are kept for page work alone come back once it is done.
  if (launch->batch.empty() && !inflight() && cache_->pinned_groups() > 0) {
    policy_.TakeAnyPages(cache_->work(), launch->batch);
  }
  nothing_ready_ = launch->batch.empty();
  if (nothing_ready_) return moved;
  for (StreamRequest* request : launch->batch.requests) {
    --request->engine.step->waiting;
    ++request->engine.step->inflight;
    if (request->engine.rows_done == 0) {
      // Requests of other threads may have come after `now`.
      request->timings.queue_ns = std::max<int64_t>(0, now - request->engine.arrival_ns);
      load_->NoteWait(request->timings.queue_ns);
    }
  }
  const absl::Status status = launcher_->Submit(launch, now);
  launch->report.predicted_ns = policy_.PredictedNanos(launch->batch);
  if (status.ok()) {
    stats_->launches_ahead += launch->launch.gate.ready.word != nullptr;
  } else {
    FailSubmit(launch, status);
  }
  return true;
}

// Rows of a launch that waits for its clients are there for its own requests. They are there for
// others only after its tensors came in time.
void StepMachine::TakeBackRows(const Batch& batch) {
  for (const StreamRequest* request : batch.requests) {
    if (!Appends(*request)) continue;
    LayerProgress& layer = request->engine.step->layers[request->attend.layer];
    layer.appended -= request->engine.rows_launched;
  }
}

bool StepMachine::CompleteLaunch(bool wait) {
  BatchLaunch* launch = launcher_->oldest();
  if (launch == nullptr || (!wait && !launcher_->OldestDone())) return false;
  const absl::Status status = launcher_->WaitOldest();
  completed_at_ = clock_->Now();
  if (status.ok()) {
    FinishLaunch(launch);
  } else {
    FailOldest(launch, status);
  }
  return true;
}

void StepMachine::FinishLaunch(BatchLaunch* launch) {
  const MonotonicNanos begin = completed_at_;
  nothing_ready_ = false;
  cache_->work().Acknowledge(&launch->batch.pages);
  mover_->Finish(&launch->batch, absl::OkStatus());
  LaunchReport& report = launch->report;
  if (launch->waited_ns > 0) ChargeWait(*launch);
  if (launch->late) {
    FinishLate(launch);
    return answers_->NoteReport(report);
  }
  if (launch->launch.gate.ready.word != nullptr) {
    ahead_pauses_.NoteInTime(launch->batch.requests.front()->engine.step->tenant);
  }
  policy_.Observe(launch->batch, report.kernel_ns);
  ++stats_->launches;
  stats_->longest_launch_ns = std::max(stats_->longest_launch_ns, report.kernel_ns);
  stats_->launches_mixed_layers += report.layers > 1;
  stats_->launches_mixed_clients += report.clients > 1;
  stats_->rows_decode += report.rows_decode;
  stats_->rows_extend += report.rows_extend;
  stats_->rows_prefill += report.rows_prefill;
  stats_->kv_bytes_read += static_cast<uint64_t>(report.kv_bytes_read);
  stats_->rounds_refused += static_cast<uint64_t>(report.rounds_refused);
  stats_->slices_fused += report.slices_fused;
  stats_->slice_waits_expired += report.slice_waits_expired;
  stats_->slice_waits_skipped += report.slice_waits_skipped;
  CheckRepeats(*launch);
  CheckResults(launch, backend_);
  const std::vector<StreamRequest*>& requests = launch->batch.requests;
  for (StreamRequest* request : requests) {
    Step* step = request->engine.step;
    const int32_t rows = std::exchange(request->engine.rows_launched, 0);
    if (Appends(*request)) {
      LayerProgress& layer = step->layers[request->attend.layer];
      if (launch->batch.gated) layer.appended += rows;
      layer.stored += rows;
    }
    request->engine.rows_done += rows;
    RequestTimings& timings = request->timings;
    timings.plan_ns += report.plan_ns;
    timings.kernel_ns += report.kernel_ns;
    timings.launch_requests = report.requests;
    timings.launch_layers = report.layers;
    timings.launch_clients = report.clients;
    timings.plan_reused = report.plan_reused;
    StepTable::Touch(step, begin);
    if (request->engine.rows_done < request->attend.row_count && request->engine.other_row < 0) {
      --step->inflight;
      ++step->waiting;
      request->engine.blocked_since_ns = begin;
      pending_.Return(request, WeightOf(*request));
      policy_.slices().Join(request);
    }
  }
  for (StreamRequest* request : requests) {
    if (request->engine.state == RequestState::kWaiting) continue;  // for a launch of its rest
    Step* step = request->engine.step;
    const absl::Status result = ResultOf(*request);
    answers_->AnswerAt(begin, request, result);
    --step->inflight;
    FinishEndIfIdle(step);
  }
  report.complete_ns = clock_->Now() - begin;
  answers_->NoteReport(report);
}

void StepMachine::FailSubmit(BatchLaunch* launch, const absl::Status& cause) {
  std::vector<StreamRequest*> failed;
  UndoLaunch(launch, cause, &failed);
  AbortFailed(failed, cause);
}

void StepMachine::FailOldest(BatchLaunch* launch, const absl::Status& cause) {
  // Later launches read what this one should have written, so they fail with it. The latest returns
  // its page work first, which keeps the order.
  std::vector<BatchLaunch*> undone = {launch};
  while (BatchLaunch* later = launcher_->oldest()) {
    const absl::Status waited = launcher_->WaitOldest();
    completed_at_ = clock_->Now();
    (void)waited;  // it counts as failed either way
    undone.push_back(later);
  }
  std::vector<StreamRequest*> failed;
  for (size_t i = undone.size(); i-- > 0;) UndoLaunch(undone[i], cause, &failed);
  AbortFailed(failed, cause);
}

void StepMachine::UndoLaunch(BatchLaunch* launch, const absl::Status& cause,
                             std::vector<StreamRequest*>* failed) {
  launch->report.ok = false;
  answers_->NoteReport(launch->report);
  Batch& batch = launch->batch;
  mover_->FailBehind(batch.pages, MoveFailed(cause));
  cache_->work().Requeue(&batch.pages);
  mover_->Finish(&batch, MoveFailed(cause));
  for (Step* step : steps_->open()) step->pages_ready = false;
  for (const Segment& segment : batch.segments) {
    cache_->UnpublishTable(segment.entry->slot);
  }
  for (StreamRequest* request : batch.requests) {
    --request->engine.step->inflight;
    failed->push_back(request);
  }
}

void StepMachine::AbortFailed(const std::vector<StreamRequest*>& failed,
                              const absl::Status& cause) {
  nothing_ready_ = false;
  const std::string why = absl::StrCat("the launch failed: ", cause.message());
  std::vector<StreamRequest*> requests = failed;
  // On a device that is lost, page work is never done: requests that wait for theirs would do so
  // until their deadlines, with one launch after another.
  while (!pending_.empty() && !backend_->Healthy().ok()) {
    requests.push_back(pending_.front());
    --requests.back()->engine.step->waiting;
    RemovePending(requests.back());
  }
  std::vector<std::pair<TenantKey, StepId>> steps;
  for (StreamRequest* request : requests) {
    Step& step = *request->engine.step;
    step.failed = true;
    steps.emplace_back(step.tenant, step.id);
    request->step_aborted = true;
    answers_->Answer(
        request,
        MakeError(absl::StatusCode::kInternal, absl::StrCat("step ", step.id, ": ", why),
                  {.reason = "launch_failed", .last_good_position = CommittedAt(step, 0)}));
  }
  // Completes launches that are still running and carry other requests of these steps.
  for (const auto& [tenant, id] : steps) AbortStep(tenant, id, absl::InternalError(why));
}

// Words may be stored at any time, so each is looked at once before requests are compared.
void StepMachine::NoteTensors() {
  awaits_slices_ = false;
  for (StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    StreamRequest::EngineFields& note = request->engine;
    note.ahead = note.ahead && !request->attend.ready.Reached();
    note.apart = false;
  }
}

bool StepMachine::MayGoAhead(const StreamRequest& request) const {
  const Step* const step = request.engine.step;  // null until the request waits
  const AttendArgs& args = request.attend;
  if (limits_.ahead_us == 0 || !backend_->Info().waits_for_words ||
      !backend_->InPlace(args.ready.word, sizeof(*args.ready.word))) {
    return false;
  }
  if (step == nullptr ? args.want_lse && args.on_device : !CanBeGated(request)) return false;
  if (ahead_pauses_.Lasts(streams_.at(request.stream).key(), clock_->Now())) return false;
  if (launcher_->AwaitsClient(request.stream)) return false;
  for (const StreamRequest* other = pending_.front(); other != nullptr;
       other = WaitingRequests::Next(other)) {
    if (other == &request) continue;
    if (other->engine.ahead) {
      // Other clients get launches of their own.
      if (other->stream == request.stream) return false;
      continue;
    }
    // A launch that waits on the device keeps requests waiting whose tensors are there. Slices of
    // the same rows may go with it, if the engine can hand them back.
    if (other->attend.ready.word == nullptr || other->engine.step->participants == 1) return false;
    if (step != nullptr && !(AreSlices(request, *other) && CanBeGated(*other))) return false;
  }
  return true;
}

// Launches of single slices would wait one after another, and each for its own client.
bool StepMachine::HasSlices(StreamRequest* request, MonotonicNanos now) {
  StreamRequest::EngineFields& note = request->engine;
  if (note.step->participants == 1) return true;
  int32_t heads = 0, slices = 0;
  for (const StreamRequest* other = pending_.front(); other != nullptr;
       other = WaitingRequests::Next(other)) {
    if (other != request && !AreSlices(*request, *other)) continue;
    heads += Computes(*other) ? other->attend.num_heads : 0;
    ++slices;
  }
  note.apart = heads < note.step->model->spec->geometry.num_heads;
  awaits_slices_ |= note.apart;
  return slices <= kernels::LaunchGate::kMostWords &&
         (!note.apart || now - note.arrival_ns < limits_.ahead_us * kNanosPerMicro);
}

void StepMachine::HandBackUndone(StreamRequest* request, HandedBack why) {
  Step* const step = request->engine.step;
  const bool appends = Appends(*request);
  const int32_t layer = request->attend.layer;
  const int32_t first = FirstRow(*request);
  // Hand it back before the later ones: the client sends them again in this order.
  answers_->HandBack(request, why);
  if (appends) DropRowsFrom(step, layer, first);
  FinishEndIfIdle(step);
}

// The wait kept other tenants from the device, so it counts as work done for this tenant.
void StepMachine::ChargeWait(const BatchLaunch& launch) {
  const StreamRequest& request = *launch.batch.requests.front();  // all are of its step
  pending_.Charge(request.engine.step->tenant, WeightOf(request),
                  policy_.UnitsOf(launch.batch, launch.waited_ns));
}

// The client's work was not done in time: the launch has no effect, and its step goes on.
void StepMachine::FinishLate(BatchLaunch* launch) {
  ahead_pauses_.Begin(launch->batch.requests.front()->engine.step->tenant, clock_->Now());
  for (StreamRequest* request : launch->batch.requests) {
    request->engine.rows_launched = 0;
    --request->engine.step->inflight;
    HandBackUndone(request, HandedBack::kLate);
  }
}

void StepMachine::RemovePending(StreamRequest* request) {
  pending_.Remove(request);
  policy_.slices().Leave(request);
}

void StepMachine::FailPending(StreamRequest* request, const absl::Status& status) {
  Step* step = request->engine.step;
  const int32_t layer = request->attend.layer;
  const bool appends = Appends(*request);
  const int32_t first = FirstRow(*request);
  RemovePending(request);
  --step->waiting;
  if (!appends) {
    answers_->Answer(request, status);
  } else {
    // Earlier launches may have stored some rows of a request that was cut up; these stay.
    answers_->Answer(request,
                     AmendDetail(status, [&](ErrorDetail& detail) { detail.next_row = first; }));
    DropRowsFrom(step, layer, first);
  }
  FinishEndIfIdle(step);
}

// Rows from `first` on cannot be appended any more, because rows before them are missing. Requests
// with such rows are dropped, and the client may send all of them again.
void StepMachine::DropRowsFrom(Step* step, int32_t layer, int32_t first) {
  int32_t& accepted = step->layers[layer].accepted;
  accepted = std::min(accepted, first);
  StreamRequest* other = pending_.front();
  while (other != nullptr) {
    StreamRequest* const next = WaitingRequests::Next(other);
    if (other->engine.step == step && other->attend.layer == layer && other->attend.has_kv &&
        EndRow(*other) > first) {
      RemovePending(other);
      --step->waiting;
      if (other->attend.ready.word != nullptr) {  // the client resends it after the earlier ones
        answers_->HandBack(other, HandedBack::kBusy);
        other = next;
        continue;
      }
      answers_->Answer(other, MakeError(absl::StatusCode::kFailedPrecondition,
                                        absl::StrCat("the rows of layer ", layer,
                                                     " before these, from ", first, " on, failed"),
                                        {.field = "attend.row_begin",
                                         .got = absl::StrCat(other->attend.row_begin),
                                         .limit = absl::StrCat(first),
                                         .reason = "rows_out_of_order",
                                         .last_good_position = CommittedAt(*step, first),
                                         .next_row = first}));
    }
    other = next;
  }
}

void StepMachine::FailWaiting(MonotonicNanos now) {
  NoteTensors();
  pending_.StartPass();
  while (StreamRequest* const request = pending_.NextInPass()) {
    const StreamRequest::EngineFields& note = request->engine;
    int32_t first = 0;
    int32_t last = 0;
    if (note.ahead && !(MayGoAhead(*request) && HasSlices(request, now))) {
      RemovePending(request);
      --note.step->waiting;
      HandBackUndone(request, HandedBack::kBusy);
    } else if (now >= note.deadline_ns) {
      FailLate(request);
    } else if (BatchPolicy::WaitsForRows(*request, &first, &last) &&
               now - note.blocked_since_ns >= limits_.kv_wait_ms * kNanosPerMilli) {
      FailRowsMissing(request, first, last);
    }
  }
}

void StepMachine::FailLate(StreamRequest* request) {
  const StreamRequest::EngineFields& note = request->engine;
  const int64_t timeout_us = (note.deadline_ns - note.first_arrival_ns) / 1000;
  const std::string rest = note.rows_done > 0
                               ? absl::StrCat("row ", FirstRow(*request), " of the request")
                               : std::string("the request");
  FailPending(
      request,
      MakeError(absl::StatusCode::kDeadlineExceeded,
                absl::StrCat("no launch took ", rest, " within ", timeout_us, " us of its arrival"),
                {.field = "attend.timeout_us",
                 .got = absl::StrCat(timeout_us),
                 .limit = "the time until a launch takes the request",
                 .reason = "deadline",
                 .last_good_position = CommittedAt(*note.step, FirstRow(*request))}));
}

// Fails the request because rows first..last of its step, which it waits for, have not arrived.
void StepMachine::FailRowsMissing(StreamRequest* request, int32_t first, int32_t last) {
  FailPending(
      request,
      MakeError(
          absl::StatusCode::kFailedPrecondition,
          absl::StrCat("KV rows ", first, "..", last, " of layer ", request->attend.layer,
                       " did not arrive within ", limits_.kv_wait_ms, " ms"),
          {.field = "attend.row_begin",
           .got = absl::StrCat("rows up to ", last),
           .limit = first == 0 ? std::string("no row, as none has arrived")
                               : absl::StrCat("rows up to ", first - 1, ", which have arrived"),
           .reason = "kv_rows_missing",
           .last_good_position = CommittedAt(*request->engine.step, first)}));
}

int64_t StepMachine::ReadyWork() const {
  int64_t work = 0;
  int looked = 0;
  for (const StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    if (++looked > kReadyWorkRequests) return std::numeric_limits<int64_t>::max();
    int64_t kv = 0;
    for (const StepEntry& entry : request->engine.step->entries) {
      kv = std::max<int64_t>(kv, entry.start + entry.rows);
    }
    // An indexer looks at a key of every row that the query row sees.
    if (!Selects(request->attend)) kv = std::min(kv, MostPlaces(*request));
    work += int64_t{request->attend.row_count} * request->attend.num_heads * kv;
  }
  return work;
}

void StepMachine::Tick() {
  const MonotonicNanos now = clock_->Now();
  FailWaiting(now);
  bool changed = true;
  while (changed) {
    changed = false;
    for (Step* step : steps_->open()) {
      if (!step->idle() || now < step->lease_deadline) continue;
      AbortStep(step->tenant, step->id,
                absl::AbortedError(
                    absl::StrCat("its lease of ", step->lease_ns / kNanosPerMilli, " ms ran out")));
      changed = true;  // The walk starts again, because the list of open steps has changed.
      break;
    }
  }
  stats_->leases_expired += sequences_->ExpireLeases();
  stats_->models_expired += models_->ExpireLeases();
  hints_->Expire();
}

void StepMachine::NotePause(int64_t nanos) {
  ++stats_->pauses;
  sequences_->PostponeLeases(nanos);
  models_->PostponeLeases(nanos);
  for (Step* step : steps_->open()) step->lease_deadline += nanos;
  for (StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    request->engine.blocked_since_ns += nanos;
  }
}

MonotonicNanos StepMachine::NextTick() const {
  const MonotonicNanos now = pending_.empty() ? 0 : clock_->Now();
  MonotonicNanos next =
      std::min({sequences_->NextExpiry(), models_->NextExpiry(), hints_->NextExpiry()});
  for (const Step* step : steps_->open()) {
    if (step->idle()) next = std::min(next, step->lease_deadline);
  }
  int32_t first = 0;
  int32_t last = 0;
  for (const StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    next = std::min(next, request->engine.deadline_ns);
    if (request->engine.apart) {
      next = std::min(next, request->engine.arrival_ns + limits_.ahead_us * kNanosPerMicro);
    }
    if (const MonotonicNanos held = policy_.HeldUntil(*request); held > now) {
      next = std::min(next, held);
    }
    if (BatchPolicy::WaitsForRows(*request, &first, &last)) {
      next = std::min(next, request->engine.blocked_since_ns + limits_.kv_wait_ms * kNanosPerMilli);
    }
  }
  return next;
}

void StepMachine::AddStats(EngineStats* stats) const {
  stats->open_steps = static_cast<int32_t>(steps_->open().size());
  stats->streams = static_cast<int32_t>(streams_.size());
  stats->requests_waiting = pending_.size();
  const MonotonicNanos now = clock_->Now();
  for (const StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    const size_t stage = BatchPolicy::Ready(*request)
                             ? static_cast<size_t>(policy_.StageOf(*request))
                             : stats->oldest_waiting_ns.size() - 1;
    int64_t& oldest = stats->oldest_waiting_ns[stage];
    oldest = std::max(oldest, now - request->engine.arrival_ns);
  }
  stats->plan_hits = launcher_->plan_stats().hits;
  stats->plan_misses = launcher_->plan_stats().misses;
  for (const Step* step : steps_->open()) stats->requests_running += step->inflight;
}

}  // namespace mla::scheduler
