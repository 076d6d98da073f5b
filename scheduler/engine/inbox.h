// The bounded hand-over point between transports and the engine: a multi-producer queue whose links
// live in the requests.
#ifndef MLA_SCHEDULER_ENGINE_INBOX_H_
#define MLA_SCHEDULER_ENGINE_INBOX_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/clock.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Thread-safe. Locks are the standard library's, so that a thread sanitizer sees them.
class Inbox {
 public:
  void Push(StreamRequest* request) {
    request->engine.next = nullptr;
    const MutexLock lock(mutex_);
    (tail_ == nullptr ? head_ : tail_->engine.next) = request;
    tail_ = request;
    filled_.store(true, std::memory_order_release);
  }

  // Everything pushed so far, linked by engine.next in order of arrival; null if nothing.
  StreamRequest* TakeAll() {
    if (empty()) return nullptr;
    const MutexLock lock(mutex_);
    StreamRequest* const first = head_;
    head_ = tail_ = nullptr;
    filled_.store(false, std::memory_order_release);
    return first;
  }

  bool empty() const { return !filled_.load(std::memory_order_acquire); }

  // Wakes the waiter; a wake without a waiter is kept.
  void Wake() {
    {
      const MutexLock lock(mutex_);
      woken_ = true;
    }
    wake_.NotifyOne();
  }

  // Sleeps until something was pushed and not taken, Wake was called, or `nanos` have passed.
  void Wait(int64_t nanos) {
    MutexLock lock(mutex_);
    wake_.WaitFor(lock, std::chrono::nanoseconds(nanos),
                  [this]()
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_ || head_ != nullptr; });
    woken_ = false;
  }

 private:
  Mutex mutex_;
  CondVar wake_;
  StreamRequest* head_ ABSL_GUARDED_BY(mutex_) = nullptr;
  StreamRequest* tail_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::atomic<bool> filled_{false};
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_INBOX_H_
