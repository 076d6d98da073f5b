// EngineCore: the stepping protocol. What a message may do, and what it changes.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
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
  request->engine.total_ns = now - request->engine.arrival_ns;
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
  if (!streams_.contains(request->stream)) {
    Answer(request, absl::CancelledError("the stream is closed"));
    return;
  }
  switch (request->kind) {
    case RequestKind::kBeginStep:
      // Timers may be late; a lease that has run out is over all the same.
      stats_.leases_expired += sequences_->ExpireLeases();
      status = BeginStep(request);
      break;
    case RequestKind::kAttend:
      status = AcceptAttend(request);
      wait = status.ok();
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

absl::Status EngineCore::CheckBeginSequence(TenantKey tenant, const Model& model,
                                            const StepSequenceArgs& args, size_t index) {
  const Sequence* found = sequences_->Find(tenant, args.id);
  if (found == nullptr) {
    return sequences_
        ->FindOrRefuse(tenant, args.id,
                       absl::StrCat("begin_step.sequences[", index, "].sequence_id"))
        .status();
  }
  const int64_t length = cache_->length(found->slot);
  const absl::Status status = CheckContinues(*found, length, model, args, index);
  if (status.ok()) return status;
  return AmendDetail(status, [&](ErrorDetail& detail) { detail.last_good_position = length; });
}

absl::Status EngineCore::CheckContinues(const Sequence& sequence, int64_t length,
                                        const Model& model, const StepSequenceArgs& args,
                                        size_t index) const {
  const auto path = [index](const char* field) {
    return absl::StrCat("begin_step.sequences[", index, "].", field);
  };
  if (sequence.model != &model) {
    return RefuseField(path("sequence_id"),
                       absl::StrCat("a sequence of model ", sequence.model->spec->id),
                       absl::StrCat("one of model ", model.spec->id), "wrong_model");
  }
  if (sequence.epoch != args.epoch) {
    return RefuseField(path("epoch"), absl::StrCat(args.epoch), absl::StrCat(sequence.epoch),
                       "epoch_mismatch", absl::StatusCode::kFailedPrecondition);
  }
  if (sequence.step != nullptr) {
    return RefuseField(path("sequence_id"),
                       absl::StrCat("a sequence in open step ", sequence.step->id),
                       "a sequence in no step", "in_step", absl::StatusCode::kFailedPrecondition);
  }
  if (args.start_position != length) {
    return RefuseField(path("start_position"), absl::StrCat(args.start_position),
                       absl::StrCat(length), "position_mismatch",
                       absl::StatusCode::kFailedPrecondition);
  }
  const int64_t room =
      std::min<int64_t>(limits_.max_sequence_rows, cache_->max_rows(sequence.slot)) - length;
  const int64_t most = std::min<int64_t>(limits_.max_step_rows, room);
  return CheckRange([&] { return path("rows"); }, args.rows, 1, most);
}

absl::Status EngineCore::CheckBegin(TenantKey tenant, const BeginStepArgs& args, Model** model) {
  if (draining_) return DrainingError();
  if (absl::Status healthy = backend_->Healthy(); !healthy.ok()) {
    return MakeError(absl::StatusCode::kUnavailable,
                     absl::StrCat("the backend is not healthy: ", healthy.message()),
                     {.reason = "backend_unhealthy"});
  }
  absl::StatusOr<Model*> found = models_->Find(tenant, args.model_id, "begin_step.model_id");
  if (!found.ok()) return found.status();
  *model = *found;
  const int64_t sequences = static_cast<int64_t>(args.sequences.size());
  if (sequences < 1 || sequences > limits_.max_step_sequences) {
    return RefuseField("begin_step.sequences", absl::StrCat(sequences, " entries"),
                       absl::StrCat("1..", limits_.max_step_sequences), "out_of_range");
  }
  if (args.participants < 1 || args.participants > limits_.max_participants) {
    return RefuseField("begin_step.participants", absl::StrCat(args.participants),
                       absl::StrCat("0..", limits_.max_participants), "out_of_range");
  }
  return CheckRange("begin_step.lease_ms", args.lease_ms, 0, limits_.longest_step_lease_ms());
}

// What of the step's pages was refused: by the tenant's bound, or because the pool has no room.
absl::Status EngineCore::RefusePages(const std::vector<StepEntry>& entries, const Model& model,
                                     std::optional<Resource> refused, const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  const kvcache::GroupLayout& layout = model.layout;
  int64_t groups = 0;
  for (const StepEntry& entry : entries) {
    const auto pages = [&](int64_t rows) {
      return (rows + layout.page_size - 1) / layout.page_size;
    };
    groups += pages(int64_t{entry.start} + entry.rows) - pages(entry.start);
  }
  const int64_t wanted = groups * layout.group_bytes();
  absl::Status answer = status;
  if (refused) {
    answer = tenants_.Refusal(*model.account, *refused, wanted, "begin_step.sequences");
  } else {
    const int64_t free_groups = cache_->free_groups(model.layout_id);
    answer = MakeError(
        status.code(), status.message(),
        {.field = "begin_step.sequences",
         .got = absl::StrCat("rows that need ", groups, " page groups and copies of shared ones"),
         .limit = absl::StrCat(free_groups, " free page groups"),
         .reason = RowOf(Resource::kKvBytes).reason,
         .resource = RowOf(Resource::kKvBytes).name,
         .wanted = wanted,
         .free = free_groups * layout.group_bytes(),
         .bound = limits_.kv_cache_bytes,
         .bound_of = BoundOwner::kServer});
  }
  return AmendDetail(answer,
                     [&](ErrorDetail& detail) { detail.retry_after_ms = limits_.step_lease_ms; });
}

absl::Status EngineCore::ReserveStep(const std::vector<StepEntry>& entries, const Model& model) {
  step_rows_.clear();
  for (const StepEntry& entry : entries) {
    step_rows_.push_back({entry.sequence->slot, entry.rows});
  }
  const absl::Status status = cache_->Reserve(step_rows_);
  const std::optional<Resource> refused = model.pool_account->TakeRefused();
  if (!status.ok()) return RefusePages(entries, model, refused, status);
  return status;
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
  streams_.at(request->stream).steps->Add(step->id, {step->model->spec, step->total_rows});
  StepTable::Touch(step, request->engine.arrival_ns);
  request->total_rows = step->total_rows;
  request->lease_ms = step->lease_ns / kNanosPerMilli;
  request->joined = static_cast<int32_t>(step->streams.size());
  return absl::OkStatus();
}

absl::Status EngineCore::BeginStep(StreamRequest* request) {
  Stream& stream = streams_.at(request->stream);
  if (!stream.row) {
    absl::StatusOr<TenantRef> row = tenants_.Enter(stream.tenant);
    if (!row.ok()) return row.status();
    stream.row = *std::move(row);
  }
  const TenantKey tenant = stream.key();
  BeginStepArgs& args = request->begin;
  if (args.participants == 0) args.participants = 1;
  Step* existing = steps_->Lookup(tenant, request->step_id);
  if (existing != nullptr) return JoinStep(existing, request);

  Model* model = nullptr;
  absl::Status status = CheckBegin(tenant, args, &model);
  if (!status.ok()) return status;
  absl::StatusOr<Step*> created = steps_->Create(model, request->step_id);
  if (!created.ok()) return created.status();
  Step* step = *created;
  int64_t total = 0;
  for (size_t i = 0; i < args.sequences.size() && status.ok(); ++i) {
    const StepSequenceArgs& wanted = args.sequences[i];
    status = CheckBeginSequence(tenant, *model, wanted, i);
    if (!status.ok()) break;
    Sequence* sequence = sequences_->Find(tenant, wanted.id);
    sequence->step = step;  // also refuses a sequence that is named twice
    step->entries.push_back({sequence, static_cast<int32_t>(wanted.start_position), wanted.rows,
                             static_cast<int32_t>(total)});
    total += wanted.rows;
    if (total > limits_.max_step_rows) {
      status = RefuseField("begin_step.sequences", absl::StrCat(total, " rows"),
                           absl::StrCat("at most ", limits_.max_step_rows, " rows a step"),
                           "out_of_range");
    }
  }
  if (status.ok()) status = ReserveStep(step->entries, *model);
  if (!status.ok()) {
    for (const StepEntry& entry : step->entries) entry.sequence->step = nullptr;
    steps_->Remove(step, "");
    return status;
  }
  step->ticket = cache_->work().last();
  step->pages_ready = !cache_->work().Waits(stream.key(), step->ticket);
  step->total_rows = static_cast<int32_t>(total);
  step->participants = args.participants;
  step->ranks.assign(step->participants, StepRank());
  step->streams.push_back(request->stream);
  step->layers.assign(model->spec->layers, LayerProgress());
  step->lease_deadline = 0;  // of the step that had this place before
  step->lease_ns = (args.lease_ms > 0 ? args.lease_ms : limits_.step_lease_ms) * kNanosPerMilli;
  return JoinStep(step, request);
}

absl::Status EngineCore::AcceptAttend(StreamRequest* request) {
  const Stream& stream = streams_.at(request->stream);
  absl::StatusOr<Step*> found = steps_->Find(stream.key(), request->stream, request->step_id);
  if (!found.ok()) {
    request->step_aborted = absl::IsAborted(found.status());
    return found.status();
  }
  Step* step = *found;
  StepTable::Touch(step, request->engine.arrival_ns);
  AttendArgs& args = request->attend;
  StreamRequest::EngineFields& note = request->engine;
  absl::Status status = CheckAttend(*step, args, &note.repeat);
  if (!status.ok()) return status;
  if (args.has_kv && !note.repeat) {
    LayerProgress& layer = step->layers[args.layer];
    layer.accepted += args.row_count;
    layer.writer_head = args.head_offset;
    HeadSliceTable::RowsAccepted(*step, args.layer, note.arrival_ns);
  }
  note.step = step;
  note.rows_done = 0;
  note.bad_row = note.bad_head = note.other_row = -1;
  note.rows_launched = 0;
  note.group = nullptr;
  note.sibling = nullptr;
  note.blocked_since_ns = note.arrival_ns;
  note.deadline_ns = note.arrival_ns + limits_.queue_ms * kNanosPerMilli;
  if (args.timeout_us > 0) {
    note.deadline_ns =
        std::min(note.deadline_ns, note.arrival_ns + args.timeout_us * kNanosPerMicro);
  }
  request->timings = RequestTimings();
  ++step->waiting;
  pending_.Add(request, WeightOf(*request));
  policy_.slices().Join(request);
  return absl::OkStatus();
}

absl::Status EngineCore::LeaderOf(StreamRequest* request, Step** step) {
  const Stream& stream = streams_.at(request->stream);
  absl::StatusOr<Step*> found = steps_->Find(stream.key(), request->stream, request->step_id);
  if (!found.ok()) {
    request->step_aborted = absl::IsAborted(found.status());
    return found.status();
  }
  *step = *found;
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
    cache_->Commit(entry.sequence->slot, committed.empty() ? entry.rows : committed[i]);
    const int64_t length = cache_->length(entry.sequence->slot);
    entry.sequence->ForgetRowsFrom(length);
    request->lengths.push_back(length);
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
  absl::Status status = LeaderOf(request, &step);
  if (!status.ok()) return status;
  AbortStep(step->tenant, step->id, absl::AbortedError("the client aborted it"));
  return absl::OkStatus();
}

void EngineCore::AbortStep(TenantKey tenant, StepId id, const absl::Status& status) {
  Step* step = steps_->Lookup(tenant, id);
  // A launch in flight reads the step's pages; its rows may only be given back afterwards.
  // Completing it may itself end or abort the step, hence the second look.
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
    entry.sequence->ForgetRowsFrom(entry.start);
  }
  ++stats_.steps_aborted;
  CloseStep(step, std::string(status.message()));
}

}  // namespace mla::scheduler
