// The bounded hand-over point between transports and the engine: a multi-producer queue whose links
// live in the requests.
#ifndef MLA_SCHEDULER_ENGINE_INBOX_H_
#define MLA_SCHEDULER_ENGINE_INBOX_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "scheduler/clock.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Thread-safe. Locks are the standard library's, so that a thread sanitizer sees them.
class Inbox {
 public:
  void Push(StreamRequest* request) {
    request->engine.next = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    (tail_ == nullptr ? head_ : tail_->engine.next) = request;
    tail_ = request;
    filled_.store(true, std::memory_order_release);
  }

  // Everything pushed so far, linked by engine.next in order of arrival; null if nothing.
  StreamRequest* TakeAll() {
    if (empty()) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    StreamRequest* const first = head_;
    head_ = tail_ = nullptr;
    filled_.store(false, std::memory_order_release);
    return first;
  }

  bool empty() const { return !filled_.load(std::memory_order_acquire); }

  // Wakes the waiter; a wake without a waiter is kept.
  void Wake() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    wake_.notify_one();
  }

  // Sleeps until something was pushed and not taken, Wake was called, or `nanos` have passed.
  void Wait(int64_t nanos) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, std::chrono::nanoseconds(nanos),
                   [this] { return woken_ || head_ != nullptr; });
    woken_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  StreamRequest* head_ = nullptr;
  StreamRequest* tail_ = nullptr;
  std::atomic<bool> filled_{false};
  bool woken_ = false;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_INBOX_H_
