// Notes which driver call a backend is in, for a thread that checks whether the call ever returns.
// Driver calls have no time limit of their own, and wait for calls of other threads.
//
// Threading: a Scope belongs to the thread that makes it, one at a time; any thread may call Read.
#ifndef MLA_KERNELS_HIP_RUNTIME_CALL_WATCH_H_
#define MLA_KERNELS_HIP_RUNTIME_CALL_WATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace mla::kernels::hip {

class CallWatch final {
 public:
  // During its lifetime the thread runs the call `what`, a literal.
  class Scope {
   public:
    Scope(CallWatch& watch, const char* what) : watch_(watch) {
      watch_.driver_call_.store(nullptr, std::memory_order_relaxed);
      watch_.since_.store(SteadyNanos(), std::memory_order_relaxed);
      watch_.what_.store(what, std::memory_order_release);
      of_thread_ = &watch_;
    }
    ~Scope() {
      of_thread_ = nullptr;
      watch_.what_.store(nullptr, std::memory_order_release);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallWatch& watch_;
  };

  struct Running {
    const char* what = nullptr;         // null: none
    const char* driver_call = nullptr;  // its last one; null: it has made none yet
    std::chrono::nanoseconds lasts{0};
  };
  Running Read() const {
    Running now;
    now.what = what_.load(std::memory_order_acquire);
    if (now.what == nullptr) return now;
    now.driver_call = driver_call_.load(std::memory_order_relaxed);
    now.lasts = std::chrono::nanoseconds(SteadyNanos() - since_.load(std::memory_order_relaxed));
    return now;
  }

  // Notes that the calling thread is about to make this driver call, a literal. Does nothing
  // outside of a Scope.
  static void NoteDriverCall(const char* name) {
    if (of_thread_ != nullptr) of_thread_->driver_call_.store(name, std::memory_order_relaxed);
  }

 private:
  static inline thread_local CallWatch* of_thread_ = nullptr;

  std::atomic<const char*> what_{nullptr}, driver_call_{nullptr};
  std::atomic<int64_t> since_{0};
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_CALL_WATCH_H_
