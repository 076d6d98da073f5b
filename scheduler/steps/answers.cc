#include "scheduler/steps/answers.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::scheduler {

void DeliverAnswer(StreamRequest* request, const absl::Status& status, EngineObserver* observer) {
  // Copied first, because the request may be used again, or be gone, before Done returns.
  const RequestReport report{request->kind, status.ok(), request->timings.queue_ns,
                             request->engine.total_ns};
  const bool answered = request->handed_back == HandedBack::kNo;
  request->engine.state.Enter(RequestState::kOutside);
  request->Done(status);
  if (observer != nullptr && answered) observer->OnRequest(report);
}

// ----------------------------------------------------------------------------- AnswerCollector

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

// --------------------------------------------------------------------------------- AnswerQueue

void AnswerQueue::Start(std::function<void()> after_delivery) {
  after_delivery_ = std::move(after_delivery);
  {
    const MutexLock lock(mutex_);
    running_ = true;
  }
  thread_ = std::thread([this] { Run(); });
}

void AnswerQueue::Stop() {
  Flush();
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  work_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

void AnswerQueue::Push(const AnswerList& answers) {
  if (answers.empty()) return;
  {
    const MutexLock lock(mutex_);
    waiting_.Append(answers);
    has_waiting_ = true;
    pushed_ += answers.size;
    wanted_ = true;
  }
  work_.NotifyOne();
}

AnswerList AnswerQueue::PushAndClaim(const AnswerList& answers) {
  if (answers.empty()) return {};
  bool busy = false;
  // Only a holder of the role adds to waiting_, and this thread holds it, so waiting_ stays empty
  // until the claim.
  if (!has_waiting_.load() && busy_.compare_exchange_strong(busy, true)) {
    pushed_ += answers.size;
    return answers;
  }
  const MutexLock lock(mutex_);
  waiting_.Append(answers);
  has_waiting_ = true;
  pushed_ += answers.size;
  AnswerList claimed;
  TryClaim(&claimed);
  return claimed;
}

// Returns false if nothing waits or another thread is delivering.
bool AnswerQueue::TryClaim(AnswerList* claimed) {
  bool busy = false;
  if (waiting_.empty() || !busy_.compare_exchange_strong(busy, true)) return false;
  wanted_ = false;
  has_waiting_ = false;
  *claimed = std::exchange(waiting_, {});
  return true;
}

void AnswerQueue::Deliver(AnswerList claimed) {
  if (claimed.empty()) return;
  do {
    deliverer_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    while (!claimed.empty()) DeliverFirst(&claimed);
    deliverer_.store(std::thread::id(), std::memory_order_relaxed);
  } while (EndDelivery(&claimed));
}

void AnswerQueue::DeliverFirst(AnswerList* answers) {
  StreamRequest* const request = answers->PopFront();
  ++delivered_now_;
  // Moved out first: Done may end the request, and DeliverAnswer reads the rest before it calls
  // Done.
  const absl::Status status = std::exchange(request->engine.status, absl::OkStatus());
  DeliverAnswer(request, status, observer_);
}

// Returns true if the caller must go on and deliver the answers now in `claimed`.
bool AnswerQueue::EndDelivery(AnswerList* claimed) {
  delivered_ += std::exchange(delivered_now_, 0);
  busy_ = false;
  if (!has_waiting_ && flushing_ == 0) return false;
  const MutexLock lock(mutex_);
  done_.NotifyAll();
  if (waiting_.empty()) return false;
  if (running_ && std::this_thread::get_id() != thread_.get_id()) {
    wanted_ = true;
    work_.NotifyOne();
    return false;
  }
  return TryClaim(claimed);
}

void AnswerQueue::Flush() {
  MutexLock lock(mutex_);
  ++flushing_;
  const int64_t target = pushed_;
  while (delivered_ < target) {
    AnswerList claimed;
    if (!TryClaim(&claimed)) {
      done_.Wait(lock);
      continue;
    }
    lock.Unlock();
    Deliver(claimed);
    if (after_delivery_) after_delivery_();
    lock.Lock();
  }
  --flushing_;
}

void AnswerQueue::Run() {
  MutexLock lock(mutex_);
  while (true) {
    work_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stop_ || (wanted_ && !busy_);
    });
    AnswerList claimed;
    if (!TryClaim(&claimed)) {
      wanted_ = false;
      if (stop_) return;
      continue;
    }
    lock.Unlock();
    Deliver(claimed);
    if (after_delivery_) after_delivery_();
    lock.Lock();
  }
}

}  // namespace mla::scheduler
