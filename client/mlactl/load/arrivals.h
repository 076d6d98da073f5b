// Intended start times of the steps of an open loop. They do not depend on whether a worker is
// free.
//
// Threading: any thread; each arrival is returned once, in order.
#ifndef MLA_CLIENT_MLACTL_LOAD_ARRIVALS_H_
#define MLA_CLIENT_MLACTL_LOAD_ARRIVALS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <random>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::mlactl {

enum class ArrivalKind {
  kPoisson,  // independent of each other: exponential gaps
  kUniform,  // equal gaps
};

class Arrivals final {
 public:
  using Clock = std::chrono::steady_clock;

  // REQUIRES: rate_per_s > 0. Equal seeds give equal gaps.
  Arrivals(ArrivalKind kind, double rate_per_s, uint64_t seed, Clock::time_point begin);

  // Returns the next arrival if it is before `end`; otherwise none, and a later call returns it.
  std::optional<Clock::time_point> TakeBefore(Clock::time_point end);

 private:
  double Gap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ArrivalKind kind_;
  const double rate_per_s_;
  const Clock::time_point begin_;
  Mutex mutex_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  double next_s_ ABSL_GUARDED_BY(mutex_) = 0;  // after begin_
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_LOAD_ARRIVALS_H_
