#include "scheduler/engine/answer_queue.h"

namespace mla::scheduler {

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
    pushed_ += answers.size;
    wanted_ = true;
  }
  work_.NotifyOne();
}

AnswerList AnswerQueue::PushAndClaim(const AnswerList& answers) {
  if (answers.empty()) return {};
  const MutexLock lock(mutex_);
  waiting_.Append(answers);
  pushed_ += answers.size;
  return busy_ ? AnswerList() : Claim();
}

// REQUIRES: not claimed.
AnswerList AnswerQueue::Claim() {
  busy_ = true;
  wanted_ = false;
  return std::exchange(waiting_, {});
}

void AnswerQueue::Deliver(AnswerList claimed) {
  if (claimed.empty()) return;
  do {
    deliverer_ = std::this_thread::get_id();
    while (!claimed.empty()) DeliverFirst(&claimed);
    deliverer_ = std::thread::id();
  } while (EndDelivery(&claimed));
}

void AnswerQueue::DeliverFirst(AnswerList* answers) {
  StreamRequest* const request = answers->PopFront();
  ++delivered_now_;
  // Moved out: the request may be used again, or be gone, before Done returns.
  const absl::Status status = std::exchange(request->engine.status, absl::OkStatus());
  if (status.ok()) return request->Done(status, none_);
  const Fault fault = std::exchange(request->engine.fault, Fault());
  request->Done(status, fault);
}

// True if the caller must go on with what `claimed` has become.
bool AnswerQueue::EndDelivery(AnswerList* claimed) {
  const MutexLock lock(mutex_);
  delivered_ += std::exchange(delivered_now_, 0);
  busy_ = false;
  if (flushing_ > 0) done_.NotifyAll();
  if (waiting_.empty()) return false;
  if (running_ && std::this_thread::get_id() != thread_.get_id()) {
    wanted_ = true;
    work_.NotifyOne();
    return false;
  }
  *claimed = Claim();
  return true;
}

void AnswerQueue::Flush() {
  MutexLock lock(mutex_);
  const int64_t target = pushed_;
  while (delivered_ < target) {
    if (busy_) {
      ++flushing_;
      done_.Wait(lock);
      --flushing_;
      continue;
    }
    const AnswerList claimed = Claim();
    lock.Unlock();
    Deliver(claimed);
    if (after_delivery_) after_delivery_();
    lock.Lock();
  }
}

void AnswerQueue::Run() {
  MutexLock lock(mutex_);
  while (true) {
    work_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stop_ || (wanted_ && !busy_);
    });
    if (waiting_.empty() || busy_) {
      wanted_ = false;
      if (stop_) return;
      continue;
    }
    const AnswerList claimed = Claim();
    lock.Unlock();
    Deliver(claimed);
    if (after_delivery_) after_delivery_();
    lock.Lock();
  }
}

}  // namespace mla::scheduler
