#include "scheduler/steps/launch_queue.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "scheduler/batching/gated_requests.h"
#include "scheduler/launching/launch_sizes.h"

namespace mla::scheduler {
namespace {

// Requests that ReadyWork looks at before it calls the work large.
constexpr int kReadyWorkRequests = 64;

}  // namespace

LaunchQueue::LaunchQueue(const StepParts& parts, StepEnds* ends)
    : limits_(parts.limits),
      clock_(parts.clock),
      backend_(parts.backend),
      cache_(parts.cache),
      tenants_(parts.tenants),
      launcher_(parts.launcher),
      answers_(parts.answers),
      ends_(ends),
      policy_(limits_, GatherBytes(limits_, *backend_), PieceBudgetOf(limits_, *backend_)) {
  policy_.ExpectRate(backend_->Info().nanos_per_kv_byte);
  // Staging copies can merge rows at no extra cost.
  if (!backend_->Info().unified_memory) policy_.FormRuns();
}

void LaunchQueue::Add(StreamRequest* request) {
  ++request->engine.step->waiting;
  pending_.Add(request, WeightOf(*request));
  policy_.slices().Join(request);
}

void LaunchQueue::Return(StreamRequest* request) {
  ++request->engine.step->waiting;
  pending_.Return(request, WeightOf(*request));
  policy_.slices().Join(request);
}

void LaunchQueue::Remove(StreamRequest* request) {
  --request->engine.step->waiting;
  pending_.Remove(request);
  policy_.slices().Leave(request);
}

void LaunchQueue::Abort(Step* step, const absl::Status& answer) {
  StreamRequest* request = pending_.front();
  while (request != nullptr) {
    StreamRequest* const next = WaitingRequests::Next(request);
    if (request->engine.step == step) {
      Remove(request);
      request->step_aborted = true;
      answers_->Answer(request, answer);
    }
    request = next;
  }
}

void LaunchQueue::HandBack(StreamRequest* request, HandedBack why) {
  Step* const step = request->engine.step;
  const bool appends = Appends(*request);
  const int32_t layer = request->attend.layer;
  const int32_t first = FirstRow(*request);
  // Hand it back before the later ones: the client sends them again in this order.
  answers_->HandBack(request, why);
  if (appends) DropRowsFrom(step, layer, first);
  ends_->FinishIfIdle(step);
}

void LaunchQueue::Choose(MonotonicNanos now, Batch* batch) {
  policy_.Choose(pending_, cache_->work(), now, *batch);
  for (const StreamRequest* request : batch->requests) --request->engine.step->waiting;
}

void LaunchQueue::ChargeWait(const BatchLaunch& launch) {
  const StreamRequest& request = *launch.batch.requests.front();  // all are of its step
  pending_.Charge(request.engine.step->tenant, WeightOf(request),
                  policy_.UnitsOf(launch.batch, launch.waited_ns));
}

// Words may be stored at any time, so each is looked at once before requests are compared.
void LaunchQueue::NoteTensors() {
  awaits_slices_ = false;
  for (StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    StreamRequest::EngineFields& note = request->engine;
    note.ahead = note.ahead && !request->attend.ready.Reached();
    note.apart = false;
  }
}

bool LaunchQueue::MayGoAhead(const StreamRequest& request, TenantKey tenant) const {
  const Step* const step = request.engine.step;  // null until the request waits
  const AttendArgs& args = request.attend;
  if (limits_.ahead_us == 0 || !backend_->Info().waits_for_words ||
      !backend_->InPlace(args.ready.word, sizeof(*args.ready.word))) {
    return false;
  }
  if (step == nullptr ? args.want_lse && args.on_device : !CanBeGated(request)) return false;
  if (ahead_pauses_.Lasts(tenant, clock_->Now())) return false;
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
bool LaunchQueue::HasSlices(StreamRequest* request, MonotonicNanos now) {
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

int64_t LaunchQueue::ReadyWork() const {
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

void LaunchQueue::FailWaiting(MonotonicNanos now) {
  NoteTensors();
  pending_.StartPass();
  while (StreamRequest* const request = pending_.NextInPass()) {
    const StreamRequest::EngineFields& note = request->engine;
    int32_t first = 0;
    int32_t last = 0;
    if (note.ahead && !(MayGoAhead(*request, note.step->tenant) && HasSlices(request, now))) {
      Remove(request);
      HandBack(request, HandedBack::kBusy);
    } else if (now >= note.deadline_ns) {
      FailLate(request);
    } else if (BatchPolicy::WaitsForRows(*request, &first, &last) &&
               now - note.blocked_since_ns >= limits_.kv_wait_ms * kNanosPerMilli) {
      FailRowsMissing(request, first, last);
    }
  }
}

void LaunchQueue::Fail(StreamRequest* request, const absl::Status& status) {
  Step* step = request->engine.step;
  const int32_t layer = request->attend.layer;
  const bool appends = Appends(*request);
  const int32_t first = FirstRow(*request);
  Remove(request);
  if (!appends) {
    answers_->Answer(request, status);
  } else {
    // Earlier launches may have stored some rows of a request that was cut up; these stay.
    answers_->Answer(request,
                     AmendDetail(status, [&](ErrorDetail& detail) { detail.next_row = first; }));
    DropRowsFrom(step, layer, first);
  }
  ends_->FinishIfIdle(step);
}

void LaunchQueue::FailLate(StreamRequest* request) {
  const StreamRequest::EngineFields& note = request->engine;
  const int64_t timeout_us = (note.deadline_ns - note.first_arrival_ns) / 1000;
  const std::string rest = note.rows_done > 0
                               ? absl::StrCat("row ", FirstRow(*request), " of the request")
                               : std::string("the request");
  Fail(request, MakeError(absl::StatusCode::kDeadlineExceeded,
                          absl::StrCat("no launch took ", rest, " within ", timeout_us,
                                       " us of its arrival"),
                          {.field = "attend.timeout_us",
                           .got = absl::StrCat(timeout_us),
                           .limit = "the time until a launch takes the request",
                           .reason = "deadline",
                           .last_good_position = CommittedAt(*note.step, FirstRow(*request))}));
}

// Fails the request because rows first..last of its step, which it waits for, have not arrived.
void LaunchQueue::FailRowsMissing(StreamRequest* request, int32_t first, int32_t last) {
  Fail(request,
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

// Rows from `first` on cannot be appended any more, because rows before them are missing. Requests
// with such rows are dropped, and the client may send all of them again.
void LaunchQueue::DropRowsFrom(Step* step, int32_t layer, int32_t first) {
  int32_t& accepted = step->layers[layer].accepted;
  accepted = std::min(accepted, first);
  StreamRequest* other = pending_.front();
  while (other != nullptr) {
    StreamRequest* const next = WaitingRequests::Next(other);
    if (other->engine.step == step && other->attend.layer == layer && other->attend.has_kv &&
        EndRow(*other) > first) {
      Remove(other);
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

void LaunchQueue::NotePause(int64_t nanos) {
  for (StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    request->engine.blocked_since_ns += nanos;
  }
}

MonotonicNanos LaunchQueue::NextDeadline() const {
  MonotonicNanos next = std::numeric_limits<MonotonicNanos>::max();
  if (pending_.empty()) return next;
  const MonotonicNanos now = clock_->Now();
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

void LaunchQueue::AddStats(EngineStats* stats) const {
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
}

}  // namespace mla::scheduler
