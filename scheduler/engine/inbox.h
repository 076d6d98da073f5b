// The hand-over point between transports and the engine: a list that many threads add to. The links
// lie in the requests, so the list never allocates.
#ifndef MLA_SCHEDULER_ENGINE_INBOX_H_
#define MLA_SCHEDULER_ENGINE_INBOX_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Hands requests over between threads. Push and TakeAll are one atomic operation each; only
// sleeping takes a lock.
class Inbox {
 public:
  void Push(StreamRequest* request) {
    request->engine.next = last_.load(std::memory_order_relaxed);
    while (!last_.compare_exchange_weak(request->engine.next, request)) {
    }
  }

  // Returns all requests pushed before the call, linked by engine.next in order of arrival, or
  // null.
  StreamRequest* TakeAll() {
    if (empty()) return nullptr;
    StreamRequest* newest = last_.exchange(nullptr);
    StreamRequest* first = nullptr;
    while (newest != nullptr) {
      StreamRequest* const before = std::exchange(newest->engine.next, first);
      first = std::exchange(newest, before);
    }
    return first;
  }

  bool empty() const { return last_.load(std::memory_order_acquire) == nullptr; }

  // Wakes the waiter; if none waits, the next Wait returns at once.
  void Wake() {
    {
      const MutexLock lock(mutex_);
      woken_ = true;
    }
    wake_.NotifyOne();
  }

  // Sleeps until Wake is called or `nanos` have passed. Returns at once if something was pushed
  // that TakeAll has not taken.
  void Wait(int64_t nanos) {
    MutexLock lock(mutex_);
    wake_.WaitFor(lock, std::chrono::nanoseconds(nanos),
                  [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_ || !empty(); });
    woken_ = false;
  }

 private:
  std::atomic<StreamRequest*> last_{nullptr};  // pushed; its links lead to earlier ones
  Mutex mutex_;
  CondVar wake_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_INBOX_H_
