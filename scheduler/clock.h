// Gives the time as the scheduler sees it: a monotonic count of nanoseconds that tests replace, so
// that a test decides when leases and deadlines pass. The zero point is arbitrary; only differences
// mean anything. Changes of the wall clock have no effect on it.
//
// Threading: Now may be called from any thread, on every implementation.
#ifndef MLA_SCHEDULER_CLOCK_H_
#define MLA_SCHEDULER_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace mla::scheduler {

using MonotonicNanos = int64_t;

class Clock {
 public:
  virtual ~Clock() = default;
  // Never runs backwards.
  virtual MonotonicNanos Now() const = 0;
};

class RealClock final : public Clock {
 public:
  MonotonicNanos Now() const override { return SteadyNanos(); }
};

// Stands still until a test moves it.
class SimulatedClock final : public Clock {
 public:
  explicit SimulatedClock(MonotonicNanos start = 0) : now_(start) {}
  MonotonicNanos Now() const override { return now_.load(std::memory_order_acquire); }
  // REQUIRES: nanos >= 0.
  void Advance(MonotonicNanos nanos) { now_.fetch_add(nanos, std::memory_order_acq_rel); }

 private:
  std::atomic<MonotonicNanos> now_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_CLOCK_H_
