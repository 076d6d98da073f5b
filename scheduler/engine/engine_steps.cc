// EngineCore: the stepping protocol. Checks of each message, and the changes it makes.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/engine/answer_queue.h"
#include "scheduler/engine/engine_core.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMilli = 1'000'000;
constexpr int64_t kNanosPerMicro = 1'000;

}  // namespace

void EngineCore::Answer(StreamRequest* request, const absl::Status& status) {
  AnswerAt(clock_->Now(), request, status);
}

void EngineCore::AnswerAt(MonotonicNanos now, StreamRequest* request, const absl::Status& status) {
  ++stats_.requests_total;
  if (!status.ok()) ++stats_.requests_failed;
  request->engine.total_ns = now - request->engine.first_arrival_ns;
  Return(request, status);
}

void EngineCore::HandBack(StreamRequest* request, HandedBack why) {
  request->handed_back = why;
  ++(why == HandedBack::kLate ? stats_.launches_late : stats_.requests_handed_back);
  Return(request, absl::OkStatus());
}

void EngineCore::Return(StreamRequest* request, const absl::Status& status) {
  owned_.fetch_sub(1);
  if (std::exchange(request->engine.counted, false)) {
    tenants_.Return(*request->tenant, Resource::kQueuedRequests, 1);
  }
  if (!collects_answers_) return DeliverAnswer(request, status, options_.observer);
  request->engine.status = status;
  answers_.PushBack(request);
}

void EngineCore::Accept(StreamRequest* request) {
  absl::Status status;
  bool wait = false;
  nothing_ready_ = false;
  request->handed_back = HandedBack::kNo;
  if (!streams_.contains(request->stream)) {
    Answer(request, absl::CancelledError("the stream is closed"));
    return;
  }
  switch (request->kind) {
    case RequestKind::kBeginStep:
      // Timers may be late, so leases that have run out are ended first.
      stats_.leases_expired += sequences_->ExpireLeases();
      status = BeginStep(request);
      break;
    case RequestKind::kAttend:
      request->engine.step = nullptr;  // left over from an earlier use of this object
      request->engine.ahead = request->attend.ready.word != nullptr;
      // Waiting requests go first: a request that goes ahead is launched alone, or handed back.
      if (request->engine.ahead && MayLaunch()) StartLaunch();
      if (!MayGoAhead(request)) return HandBack(request, HandedBack::kBusy);
      status = AcceptAttend(request);
      wait = status.ok();
      // Requests with earlier rows may be on their way back to the client, which then resends this
      // one after them.
      if (!status.ok() && request->attend.ready.word != nullptr &&
          DetailOf(status).reason == "rows_out_of_order") {
        return HandBack(request, HandedBack::kBusy);
      }
      break;
    case RequestKind::kEndStep:
      status = EndStep(request, &wait);
      break;
    case RequestKind::kAbortStep:
      status = AbortStepRequest(request);
      break;
  }
  if (!wait) Answer(request, status);
}

absl::Status EngineCore::JoinStep(Step* step, StreamRequest* request) {
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

absl::Status EngineCore::RefuseDraining(TenantKey tenant, const BeginStepArgs& args) {
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    if (sequences_->MovedTo(tenant, args.sequences[i].id) == nullptr) continue;
    return RefuseDraining(tenant, args.sequences[i].id,
                          absl::StrCat("begin_step.sequences[", i, "].sequence_id"));
  }
  return DrainingError(/*opens=*/false);
}

absl::Status EngineCore::BeginStep(StreamRequest* request) {
  Stream& stream = streams_.at(request->stream);
  if (!stream.row) {
    MLA_ASSIGN_OR_RETURN(TenantRef row, tenants_.Enter(stream.tenant));
    stream.row = std::move(row);
  }
  const TenantKey tenant = stream.key();
  if (request->begin.participants == 0) request->begin.participants = 1;
  Step* existing = steps_->Lookup(tenant, request->step_id);
  if (existing != nullptr) return JoinStep(existing, request);

  if (draining_) return RefuseDraining(tenant, request->begin);
  MLA_ASSIGN_OR_RETURN(Step* const step, opener_->Open(tenant, *request));
  return JoinStep(step, request);
}

absl::Status EngineCore::AcceptAttend(StreamRequest* request) {
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
  note.rows_done = 0;
  note.bad_row = note.bad_head = note.other_row = -1;
  note.bad_inputs = false;
  note.rows_launched = 0;
  note.group = nullptr;
  note.sibling = nullptr;
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

absl::Status EngineCore::LeaderOf(StreamRequest* request, Step** step) {
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

absl::Status EngineCore::EndStep(StreamRequest* request, bool* wait) {
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
    *wait = true;
    return absl::OkStatus();
  }
  return CommitStep(step, request);
}

absl::Status EngineCore::CommitStep(Step* step, StreamRequest* request) {
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
    if (entry.sequence->window_slot >= 0) cache_->Commit(entry.sequence->window_slot, rows);
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

void EngineCore::CloseStep(Step* step, const std::string& why_aborted) {
  for (const StepEntry& entry : step->entries) {
    entry.sequence->step = nullptr;
    sequences_->Renew(entry.sequence);
  }
  for (const StreamId stream : step->streams) streams_.at(stream).steps->Remove(step->id);
  steps_->Remove(step, why_aborted);
}

void EngineCore::FinishEndIfIdle(Step* step) {
  if (step->end == nullptr || !step->idle() || step->failed) return;
  StreamRequest* request = std::exchange(step->end, nullptr);
  const absl::Status status = CommitStep(step, request);
  Answer(request, status);
}

absl::Status EngineCore::AbortStepRequest(StreamRequest* request) {
  Step* step = nullptr;
  MLA_RETURN_IF_ERROR(LeaderOf(request, &step));
  AbortStep(step->tenant, step->id, absl::AbortedError("the client aborted it"));
  return absl::OkStatus();
}

void EngineCore::AbortStep(TenantKey tenant, StepId id, const absl::Status& status) {
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
      Answer(request, answer);
    }
    request = next;
  }
  if (step->end != nullptr) {
    step->end->step_aborted = true;
    Answer(std::exchange(step->end, nullptr), answer);
  }
  for (const StepEntry& entry : step->entries) {
    cache_->Rollback(entry.sequence->slot);
    if (entry.sequence->window_slot >= 0) cache_->Rollback(entry.sequence->window_slot);
    entry.sequence->ForgetRowsFrom(entry.start);
  }
  ++stats_.steps_aborted;
  CloseStep(step, std::string(status.message()));
}

}  // namespace mla::scheduler
