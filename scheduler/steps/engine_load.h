// Tells how busy the engine is, for calls that must not wait for its role. Each figure is right by
// itself; together they may be of different moments.
//
// Threading: Note calls with the role; Fill from any thread.
#ifndef MLA_SCHEDULER_STEPS_ENGINE_LOAD_H_
#define MLA_SCHEDULER_STEPS_ENGINE_LOAD_H_

#include <atomic>
#include <cstdint>

#include "scheduler/probe.h"

namespace mla::scheduler {

class EngineLoad final {
 public:
  // The mean of waits moves by this part of the difference with each request.
  static constexpr int64_t kWaitPart = 16;

  // Notes that a launch has taken a request that had waited for `nanos`.
  void NoteWait(int64_t nanos) {
    const int64_t mean = wait_ns_.load(std::memory_order_relaxed);
    wait_ns_.store(mean + (nanos - mean) / kWaitPart, std::memory_order_relaxed);
  }
  // `bytes_cached` are the part of `bytes_free` that only the prefix cache holds.
  void NotePool(int64_t bytes_total, int64_t bytes_free, int64_t bytes_cached) {
    bytes_total_.store(bytes_total, std::memory_order_relaxed);
    bytes_cached_.store(bytes_cached, std::memory_order_relaxed);
    bytes_free_.store(bytes_free, std::memory_order_relaxed);
  }
  void NoteDraining(bool draining) { draining_.store(draining, std::memory_order_relaxed); }

  void Fill(ProbeAnswer* answer) const {
    answer->wait_ns = wait_ns_.load(std::memory_order_relaxed);
    answer->kv_bytes_total = bytes_total_.load(std::memory_order_relaxed);
    answer->kv_bytes_cached = bytes_cached_.load(std::memory_order_relaxed);
    answer->kv_bytes_free = bytes_free_.load(std::memory_order_relaxed);
    answer->draining = draining_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> wait_ns_{0}, bytes_total_{0}, bytes_free_{0}, bytes_cached_{0};
  std::atomic<bool> draining_{false};
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_ENGINE_LOAD_H_
