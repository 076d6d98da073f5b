#include "scheduler/steps/launches.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/launching/result_check.h"

namespace mla::scheduler {
namespace {

absl::Status MoveFailed(const absl::Status& cause) {
  return MakeError(absl::StatusCode::kInternal,
                   absl::StrCat("the launch that moved rows failed: ", cause.message()),
                   {.reason = "launch_failed"});
}

}  // namespace

bool Launches::Start(MonotonicNanos now) {
  const bool moved = tiers_ != nullptr && tiers_->Pump();
  BatchLaunch* launch = launcher_->FreeSlot();
  if (launch == nullptr) return moved;
  now = std::max(now, completed_at_);
  queue_->FailWaiting(now);
  queue_->Choose(now, &launch->batch);
  if (launch->batch.gated) TakeBackRows(launch->batch);
  if (mover_->waiting()) mover_->Take(queue_->policy(), &launch->batch);
  // Groups that are kept for page work alone come back once it is done.
  if (launch->batch.empty() && !inflight() && cache_->pinned_groups() > 0) {
    queue_->policy().TakeAnyPages(cache_->work(), launch->batch);
  }
  nothing_ready_ = launch->batch.empty();
  if (nothing_ready_) return moved;
  for (StreamRequest* request : launch->batch.requests) {
    ++request->engine.step->inflight;
    if (request->engine.rows_done == 0) {
      // Requests of other threads may have come after `now`.
      request->timings.queue_ns = std::max<int64_t>(0, now - request->engine.arrival_ns);
      load_->NoteWait(request->timings.queue_ns);
    }
  }
  const absl::Status status = launcher_->Submit(launch, now);
  launch->report.predicted_ns = queue_->policy().PredictedNanos(launch->batch);
  if (status.ok()) {
    stats_->launches_ahead += launch->launch.gate.ready.word != nullptr;
  } else {
    FailSubmit(launch, status);
  }
  return true;
}

// Rows of a launch that waits for its clients are there for its own requests. They are there for
// others only after its tensors came in time.
void Launches::TakeBackRows(const Batch& batch) {
  for (const StreamRequest* request : batch.requests) {
    if (!Appends(*request)) continue;
    LayerProgress& layer = request->engine.step->layers[request->attend.layer];
    layer.appended -= request->engine.rows_launched;
  }
}

bool Launches::Complete(bool wait) {
  BatchLaunch* launch = launcher_->oldest();
  if (launch == nullptr || (!wait && !launcher_->OldestDone())) return false;
  const absl::Status status = launcher_->WaitOldest();
  completed_at_ = clock_->Now();
  if (status.ok()) {
    Finish(launch);
  } else {
    FailOldest(launch, status);
  }
  return true;
}

void Launches::Finish(BatchLaunch* launch) {
  const MonotonicNanos begin = completed_at_;
  nothing_ready_ = false;
  cache_->work().Acknowledge(&launch->batch.pages);
  if (!launch->batch.moves.empty()) mover_->Finish(&launch->batch, absl::OkStatus());
  LaunchReport& report = launch->report;
  if (launch->waited_ns > 0) queue_->ChargeWait(*launch);
  if (launch->late) {
    FinishLate(launch);
    return answers_->NoteReport(report);
  }
  if (launch->launch.gate.ready.word != nullptr) {
    queue_->ahead_pauses().NoteInTime(launch->batch.requests.front()->engine.step->tenant);
  }
  queue_->policy().Observe(launch->batch, report.kernel_ns);
  CountFinished(report);
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
      request->engine.blocked_since_ns = begin;
      queue_->Return(request);
    }
  }
  for (StreamRequest* request : requests) {
    if (request->engine.state == RequestState::kWaiting) continue;  // for a launch of its rest
    Step* step = request->engine.step;
    const absl::Status result = ResultOf(*request);
    answers_->AnswerAt(begin, request, result);
    --step->inflight;
    ends_->FinishIfIdle(step);
  }
  report.complete_ns = clock_->Now() - begin;
  answers_->NoteReport(report);
}

void Launches::CountFinished(const LaunchReport& report) {
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
}

// The client's work was not done in time: the launch has no effect, and its step goes on.
void Launches::FinishLate(BatchLaunch* launch) {
  queue_->ahead_pauses().Begin(launch->batch.requests.front()->engine.step->tenant, clock_->Now());
  for (StreamRequest* request : launch->batch.requests) {
    request->engine.rows_launched = 0;
    --request->engine.step->inflight;
    queue_->HandBack(request, HandedBack::kLate);
  }
}

void Launches::FailSubmit(BatchLaunch* launch, const absl::Status& cause) {
  std::vector<StreamRequest*> failed;
  Undo(launch, cause, &failed);
  AbortFailed(failed, cause);
}

void Launches::FailOldest(BatchLaunch* launch, const absl::Status& cause) {
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
  for (size_t i = undone.size(); i-- > 0;) Undo(undone[i], cause, &failed);
  AbortFailed(failed, cause);
}

void Launches::Undo(BatchLaunch* launch, const absl::Status& cause,
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

void Launches::AbortFailed(const std::vector<StreamRequest*>& failed, const absl::Status& cause) {
  nothing_ready_ = false;
  const std::string why = absl::StrCat("the launch failed: ", cause.message());
  std::vector<StreamRequest*> requests = failed;
  // On a device that is lost, page work is never done: requests that wait for theirs would do so
  // until their deadlines, with one launch after another.
  while (!queue_->empty() && !backend_->Healthy().ok()) {
    requests.push_back(queue_->front());
    queue_->Remove(requests.back());
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

void Launches::AbortStep(TenantKey tenant, StepId id, const absl::Status& status) {
  Step* step = steps_->Lookup(tenant, id);
  // A launch in flight reads the step's pages; its rows may only be given back afterwards.
  // Completing it may end or abort the step, so look the step up again.
  if (step != nullptr && step->inflight > 0) {
    while (Complete(/*wait=*/true)) {
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
  queue_->Abort(step, answer);
  ends_->Abort(step, answer, std::string(status.message()));
}

}  // namespace mla::scheduler
