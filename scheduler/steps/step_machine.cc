#include "scheduler/steps/step_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {

StepMachine::StepMachine(const StepParts& parts)
    : limits_(parts.limits),
      clock_(parts.clock),
      tenants_(parts.tenants),
      models_(parts.models),
      sequences_(parts.sequences),
      steps_(parts.steps),
      opener_(parts.opener),
      launcher_(parts.launcher),
      hints_(parts.hints),
      draining_(parts.draining),
      answers_(parts.answers),
      stats_(parts.stats),
      ends_(parts, &streams_),
      queue_(parts, &ends_),
      launches_(parts, &ends_, &queue_) {}

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
      launches_.AbortStep(step->tenant, step->id,
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
  launches_.NoteArrival();
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
        if (launches_.MayStart()) launches_.Start();
        launches_.NoteArrival();
        request->engine.ahead = !request->attend.ready.Reached();
        if (request->engine.ahead &&
            !queue_.MayGoAhead(*request, streams_.at(request->stream).key())) {
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

absl::StatusOr<Step*> StepMachine::FindStep(StreamRequest* request) const {
  const Stream& stream = streams_.at(request->stream);
  absl::StatusOr<Step*> step = steps_->Find(stream.key(), request->stream, request->step_id);
  if (!step.ok()) request->step_aborted = absl::IsAborted(step.status());
  return step;
}

absl::StatusOr<Step*> StepMachine::FindAsLeader(StreamRequest* request) const {
  MLA_ASSIGN_OR_RETURN(Step* const step, FindStep(request));
  if (step->streams[0] == request->stream) return step;
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   "only the stream that began the step may end or abort it",
                   {.field = "step_id",
                    .got = absl::StrCat(request->step_id),
                    .limit = "a step that this stream began",
                    .reason = "not_the_leader"});
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
  MLA_ASSIGN_OR_RETURN(Step* const step, FindStep(request));
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
  queue_.Add(request);
  return absl::OkStatus();
}

absl::Status StepMachine::EndStep(StreamRequest* request, bool* wait) {
  MLA_ASSIGN_OR_RETURN(Step* const step, FindAsLeader(request));
  return ends_.End(step, request, wait);
}

absl::Status StepMachine::AbortStepRequest(StreamRequest* request) {
  MLA_ASSIGN_OR_RETURN(const Step* const step, FindAsLeader(request));
  launches_.AbortStep(step->tenant, step->id, absl::AbortedError("the client aborted it"));
  return absl::OkStatus();
}

int32_t StepMachine::AbortAll(const std::string& why) {
  int32_t aborted = 0;
  while (!steps_->open().empty()) {
    Step* step = steps_->open().front();
    launches_.AbortStep(step->tenant, step->id, absl::AbortedError(why));
    ++aborted;
  }
  return aborted;
}

void StepMachine::Tick() {
  const MonotonicNanos now = clock_->Now();
  queue_.FailWaiting(now);
  bool changed = true;
  while (changed) {
    changed = false;
    for (Step* step : steps_->open()) {
      if (!step->idle() || now < step->lease_deadline) continue;
      launches_.AbortStep(step->tenant, step->id,
                          absl::AbortedError(absl::StrCat(
                              "its lease of ", step->lease_ns / kNanosPerMilli, " ms ran out")));
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
  queue_.NotePause(nanos);
}

MonotonicNanos StepMachine::NextTick() const {
  MonotonicNanos next = std::min({sequences_->NextExpiry(), models_->NextExpiry(),
                                  hints_->NextExpiry(), queue_.NextDeadline()});
  for (const Step* step : steps_->open()) {
    if (step->idle()) next = std::min(next, step->lease_deadline);
  }
  return next;
}

void StepMachine::AddStats(EngineStats* stats) const {
  stats->open_steps = static_cast<int32_t>(steps_->open().size());
  stats->streams = static_cast<int32_t>(streams_.size());
  queue_.AddStats(stats);
  stats->plan_hits = launcher_->plan_stats().hits;
  stats->plan_misses = launcher_->plan_stats().misses;
  for (const Step* step : steps_->open()) stats->requests_running += step->inflight;
}

}  // namespace mla::scheduler
