// EngineCore: launches, their completion and failure, and everything that time brings about.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/engine/result_check.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMilli = 1'000'000;
constexpr MonotonicNanos kNever = std::numeric_limits<MonotonicNanos>::max();
// Requests that ReadyWork looks at before it calls the work large.
constexpr int kReadyWorkRequests = 64;

absl::Status MoveFailed(const absl::Status& cause) {
  return MakeError(absl::StatusCode::kInternal,
                   absl::StrCat("the launch that moved rows failed: ", cause.message()),
                   {.reason = "launch_failed"});
}

}  // namespace

bool EngineCore::StartLaunch() {
  const bool moved = tiers_ != nullptr && tiers_->Pump();
  BatchLaunch* launch = launcher_->FreeSlot();
  if (launch == nullptr) return moved;
  const MonotonicNanos begin = clock_->Now();
  FailWaiting(begin);
  policy_.Choose(pending_, cache_->work(), begin, launch->batch);
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
      request->timings.queue_ns = begin - request->engine.arrival_ns;
      load_.NoteWait(request->timings.queue_ns);
    }
  }
  const absl::Status status = launcher_->Submit(launch, begin);
  launch->report.predicted_ns = policy_.PredictedNanos(launch->batch);
  if (status.ok()) {
    stats_.launches_ahead += launch->launch.gate.ready.word != nullptr;
  } else {
    FailSubmit(launch, status);
  }
  return true;
}

bool EngineCore::CompleteLaunch(bool wait) {
  BatchLaunch* launch = launcher_->oldest();
  if (launch == nullptr || (!wait && !launcher_->OldestDone())) return false;
  const absl::Status status = launcher_->WaitOldest();
  if (status.ok()) {
    FinishLaunch(launch);
  } else {
    FailOldest(launch, status);
  }
  return true;
}

void EngineCore::FinishLaunch(BatchLaunch* launch) {
  const MonotonicNanos begin = clock_->Now();
  nothing_ready_ = false;
  cache_->work().Acknowledge(&launch->batch.pages);
  mover_->Finish(&launch->batch, absl::OkStatus());
  LaunchReport& report = launch->report;
  if (launch->waited_ns > 0) ChargeWait(*launch);
  if (launch->late) {
    FinishLate(launch);
    return NoteReport(report);
  }
  if (launch->launch.gate.ready.word != nullptr) {
    ahead_pauses_.NoteInTime(launch->batch.requests.front()->engine.step->tenant);
  }
  policy_.Observe(launch->batch, report.kernel_ns);
  ++stats_.launches;
  stats_.longest_launch_ns = std::max(stats_.longest_launch_ns, report.kernel_ns);
  stats_.launches_mixed_layers += report.layers > 1;
  stats_.launches_mixed_clients += report.clients > 1;
  stats_.rows_decode += report.rows_decode;
  stats_.rows_extend += report.rows_extend;
  stats_.rows_prefill += report.rows_prefill;
  stats_.kv_bytes_read += static_cast<uint64_t>(report.kv_bytes_read);
  stats_.rounds_refused += static_cast<uint64_t>(report.rounds_refused);
  stats_.slices_fused += report.slices_fused;
  stats_.slice_waits_expired += report.slice_waits_expired;
  stats_.slice_waits_skipped += report.slice_waits_skipped;
  CheckRepeats(*launch);
  CheckResults(launch, backend_.get());
  std::vector<StreamRequest*>& requests = launch->batch.requests;
  for (StreamRequest*& place : requests) {
    StreamRequest* const request = place;
    Step* step = request->engine.step;
    const int32_t rows = std::exchange(request->engine.rows_launched, 0);
    if (Appends(*request)) {
      LayerProgress& layer = step->layers[request->attend.layer];
      if (request->engine.ahead) layer.appended += rows;
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
      place = nullptr;
    }
  }
  for (StreamRequest* request : requests) {
    if (request == nullptr) continue;
    Step* step = request->engine.step;
    const absl::Status result = ResultOf(*request);
    AnswerAt(begin, request, result);
    --step->inflight;
    FinishEndIfIdle(step);
  }
  report.complete_ns = clock_->Now() - begin;
  NoteReport(report);
}

void EngineCore::NoteReport(const LaunchReport& report) {
  if (options_.observer == nullptr) return;
  if (!collects_answers_ || reports_.count == LaunchReports::kMost) {
    options_.observer->OnLaunch(report);
    return;
  }
  reports_.items[static_cast<size_t>(reports_.count++)] = report;
}

void EngineCore::FailSubmit(BatchLaunch* launch, const absl::Status& cause) {
  std::vector<StreamRequest*> failed;
  UndoLaunch(launch, cause, &failed);
  AbortFailed(failed, cause);
}

void EngineCore::FailOldest(BatchLaunch* launch, const absl::Status& cause) {
  // Later launches read what this one should have written, so they fail with it. The latest returns
  // its page work first, which keeps the order.
  std::vector<BatchLaunch*> undone = {launch};
  while (BatchLaunch* later = launcher_->oldest()) {
    const absl::Status waited = launcher_->WaitOldest();
    (void)waited;  // it counts as failed either way
    undone.push_back(later);
  }
  std::vector<StreamRequest*> failed;
  for (size_t i = undone.size(); i-- > 0;) UndoLaunch(undone[i], cause, &failed);
  AbortFailed(failed, cause);
}

void EngineCore::UndoLaunch(BatchLaunch* launch, const absl::Status& cause,
                            std::vector<StreamRequest*>* failed) {
  launch->report.ok = false;
  NoteReport(launch->report);
  Batch& batch = launch->batch;
  mover_->FailBehind(batch.pages, MoveFailed(cause));
  cache_->work().Requeue(&batch.pages);
  mover_->Finish(&batch, MoveFailed(cause));
  for (Step* step : steps_->open()) step->pages_ready = false;
  for (const Segment& segment : batch.segments) {
    const Sequence& sequence = *segment.entry->sequence;
    cache_->UnpublishTable(sequence.slot);
    if (sequence.window_slot >= 0) cache_->UnpublishTable(sequence.window_slot);
  }
  for (StreamRequest* request : batch.requests) {
    if (request == nullptr) continue;
    --request->engine.step->inflight;
    failed->push_back(request);
  }
}

void EngineCore::AbortFailed(const std::vector<StreamRequest*>& failed, const absl::Status& cause) {
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
    Answer(request,
           MakeError(absl::StatusCode::kInternal, absl::StrCat("step ", step.id, ": ", why),
                     {.reason = "launch_failed", .last_good_position = CommittedAt(step, 0)}));
  }
  // Completes launches that are still running and carry other requests of these steps.
  for (const auto& [tenant, id] : steps) AbortStep(tenant, id, absl::InternalError(why));
}

bool EngineCore::MayGoAhead(StreamRequest* request) const {
  StreamRequest::EngineFields& note = request->engine;
  note.ahead = note.ahead && !request->attend.ready.Reached();
  if (!note.ahead) return true;
  // A launch that waits on the device keeps others waiting.
  const int32_t others = pending_.size() - (note.queue != nullptr ? 1 : 0);
  // Log-sum-exps would be copied to the client's memory even if the launch came too late.
  if (request->attend.want_lse && request->attend.on_device) return false;
  if (note.step != nullptr) {
    // Requests of other participants could read rows of this launch before it is known whether it
    // is late.
    if (note.step->participants > 1) return false;
    // The expanded form takes longer than going ahead would save.
    const AttendArgs& args = request->attend;
    if (IsExpanded(args.profile) &&
        args.row_count >= note.step->model->ExpandedMinRows(args.q_dtype)) {
      return false;
    }
  }
  if (ahead_pauses_.Lasts(streams_.at(request->stream).key(), clock_->Now())) return false;
  const kernels::WordValue& ready = request->attend.ready;
  return limits_.ahead_us > 0 && backend_->Info().waits_for_words && others == 0 &&
         backend_->InPlace(ready.word, sizeof(*ready.word)) && !launcher_->AwaitsClient();
}

void EngineCore::HandBackUndone(StreamRequest* request, HandedBack why) {
  Step* const step = request->engine.step;
  const bool appends = Appends(*request);
  const int32_t layer = request->attend.layer;
  const int32_t first = FirstRow(*request);
  // Hand it back before the later ones: the client sends them again in this order.
  HandBack(request, why);
  if (appends) DropRowsFrom(step, layer, first);
  FinishEndIfIdle(step);
}

// The wait kept other tenants from the device, so it counts as work done for this tenant.
void EngineCore::ChargeWait(const BatchLaunch& launch) {
  const StreamRequest& request = *launch.batch.requests.front();  // alone in its batch
  pending_.Charge(request.engine.step->tenant, WeightOf(request),
                  policy_.UnitsOf(launch.batch, launch.waited_ns));
}

// The client's work was not done in time: the launch has no effect, and its step goes on.
void EngineCore::FinishLate(BatchLaunch* launch) {
  ahead_pauses_.Begin(launch->batch.requests.front()->engine.step->tenant, clock_->Now());
  for (StreamRequest* request : launch->batch.requests) {
    request->engine.rows_launched = 0;
    --request->engine.step->inflight;
    HandBackUndone(request, HandedBack::kLate);
  }
}

void EngineCore::RemovePending(StreamRequest* request) {
  pending_.Remove(request);
  policy_.slices().Leave(request);
}

void EngineCore::FailPending(StreamRequest* request, const absl::Status& status) {
  Step* step = request->engine.step;
  const int32_t layer = request->attend.layer;
  const bool appends = Appends(*request);
  const int32_t first = FirstRow(*request);
  RemovePending(request);
  --step->waiting;
  if (!appends) {
    Answer(request, status);
  } else {
    // Earlier launches may have stored some rows of a request that was cut up; these stay.
    Answer(request, AmendDetail(status, [&](ErrorDetail& detail) { detail.next_row = first; }));
    DropRowsFrom(step, layer, first);
  }
  FinishEndIfIdle(step);
}

// Rows from `first` on cannot be appended any more, because rows before them are missing. Requests
// with such rows are dropped, and the client may send all of them again.
void EngineCore::DropRowsFrom(Step* step, int32_t layer, int32_t first) {
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
        HandBack(other, HandedBack::kBusy);
        other = next;
        continue;
      }
      Answer(other, MakeError(absl::StatusCode::kFailedPrecondition,
                              absl::StrCat("the rows of layer ", layer, " before these, from ",
                                           first, " on, failed"),
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

void EngineCore::FailWaiting(MonotonicNanos now) {
  pending_.StartPass();
  while (StreamRequest* const request = pending_.NextInPass()) {
    const StreamRequest::EngineFields& note = request->engine;
    int32_t first = 0;
    int32_t last = 0;
    if (note.ahead && !MayGoAhead(request)) {
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

void EngineCore::FailLate(StreamRequest* request) {
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
void EngineCore::FailRowsMissing(StreamRequest* request, int32_t first, int32_t last) {
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

int64_t EngineCore::ReadyWork() const {
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

void EngineCore::Tick() {
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
  stats_.leases_expired += sequences_->ExpireLeases();
  stats_.models_expired += models_->ExpireLeases();
  hints_->Expire();
}

void EngineCore::NotePause(int64_t nanos) {
  ++stats_.pauses;
  sequences_->PostponeLeases(nanos);
  models_->PostponeLeases(nanos);
  for (Step* step : steps_->open()) step->lease_deadline += nanos;
  for (StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    request->engine.blocked_since_ns += nanos;
  }
}

MonotonicNanos EngineCore::NextTick() const {
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
    if (const MonotonicNanos held = policy_.HeldUntil(*request); held > now) {
      next = std::min(next, held);
    }
    if (BatchPolicy::WaitsForRows(*request, &first, &last)) {
      next = std::min(next, request->engine.blocked_since_ns + limits_.kv_wait_ms * kNanosPerMilli);
    }
  }
  return next;
}

}  // namespace mla::scheduler
