#include "scheduler/steps/answer_collector.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::scheduler {

void AnswerCollector::Answer(StreamRequest* request, const absl::Status& status) {
  AnswerAt(clock_->Now(), request, status);
}

void AnswerCollector::AnswerAt(MonotonicNanos now, StreamRequest* request,
                               const absl::Status& status) {
  ++stats_->requests_total;
  if (!status.ok()) ++stats_->requests_failed;
  request->engine.total_ns = now - request->engine.first_arrival_ns;
  Return(request, status);
}

void AnswerCollector::HandBack(StreamRequest* request, HandedBack why) {
  request->handed_back = why;
  ++(why == HandedBack::kLate ? stats_->launches_late : stats_->requests_handed_back);
  Return(request, absl::OkStatus());
}

void AnswerCollector::Return(StreamRequest* request, const absl::Status& status) {
  request->engine.state.Enter(RequestState::kAnswered);
  owned_.fetch_sub(1);
  if (request->tenant != nullptr) {
    tenants_->Return(*request->tenant, Resource::kQueuedRequests, 1);
  }
  if (!collects_) return DeliverAnswer(request, status, observer_);
  request->engine.status = status;
  answers_.PushBack(request);
}

void AnswerCollector::NoteReport(const LaunchReport& report) {
  if (observer_ == nullptr) return;
  if (!collects_ || reports_.count == LaunchReports::kMost) {
    observer_->OnLaunch(report);
    return;
  }
  reports_.items[static_cast<size_t>(reports_.count++)] = report;
}

absl::Status AnswerCollector::Admit(StreamRequest* request, MonotonicNanos now) {
  Tenant* const tenant = request->tenant;
  if (tenant != nullptr && !tenants_->TryTake(*tenant, Resource::kQueuedRequests, 1)) {
    return tenants_->Refusal(*tenant, Resource::kQueuedRequests, 1, "request");
  }
  // Requests without a tenant have this bound only.
  if (owned_.fetch_add(1) >= limits_.queue_requests) {
    owned_.fetch_sub(1);
    if (tenant != nullptr) tenants_->Return(*tenant, Resource::kQueuedRequests, 1);
    return MakeError(
        absl::StatusCode::kResourceExhausted,
        absl::StrCat("the queue holds ", limits_.queue_requests, " requests, which is its limit"),
        {.reason = "queue_full", .retry_after_ms = RowOf(Resource::kQueuedRequests).retry_ms});
  }
  request->engine.Begin(now, request->handed_back != HandedBack::kNo);
  request->handed_back = HandedBack::kNo;
  return absl::OkStatus();
}

}  // namespace mla::scheduler
