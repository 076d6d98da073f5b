// Locks that clang's thread-safety analysis understands. `./dev lint` runs it: a member declared
// ABSL_GUARDED_BY(mutex_) is touched only where mutex_ is held, and a function declared
// ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) is called only there.
//
// Thin layers over the standard library's locks, which the thread sanitizer sees into; Debian's
// Abseil is not instrumented, so absl::Mutex would hide races from it.
#ifndef MLA_BASE_MUTEX_H_
#define MLA_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/base/thread_annotations.h"

namespace mla {

class ABSL_LOCKABLE Mutex final {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  bool TryLock() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds the mutex from its construction to its destruction, except between Unlock and Lock.
class ABSL_SCOPED_LOCKABLE MutexLock final {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() ABSL_UNLOCK_FUNCTION() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { lock_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { lock_.unlock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// Every wait releases the mutex of `lock` while it lasts and holds it again when it returns. A
// predicate is called with the mutex held; declare it with ABSL_EXCLUSIVE_LOCKS_REQUIRED.
class CondVar final {
 public:
  void Wait(MutexLock& lock) { condition_.wait(lock.lock_); }
  template <typename Predicate>
  void Wait(MutexLock& lock, Predicate holds) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    condition_.wait(lock.lock_, std::move(holds));
  }

  // Without a predicate these return false when the time is up.
  template <typename Rep, typename Period>
  bool WaitFor(MutexLock& lock, std::chrono::duration<Rep, Period> time) {
    return condition_.wait_for(lock.lock_, time) == std::cv_status::no_timeout;
  }
  template <typename Clock, typename Duration>
  bool WaitUntil(MutexLock& lock, std::chrono::time_point<Clock, Duration> end) {
    return condition_.wait_until(lock.lock_, end) == std::cv_status::no_timeout;
  }
  // With a predicate: returns its value at the end.
  template <typename Rep, typename Period, typename Predicate>
  bool WaitFor(MutexLock& lock, std::chrono::duration<Rep, Period> time,
               Predicate holds) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return condition_.wait_for(lock.lock_, time, std::move(holds));
  }
  template <typename Clock, typename Duration, typename Predicate>
  bool WaitUntil(MutexLock& lock, std::chrono::time_point<Clock, Duration> end,
                 Predicate holds) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return condition_.wait_until(lock.lock_, end, std::move(holds));
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace mla

#endif  // MLA_BASE_MUTEX_H_
