#include "client/mlactl/load/arrivals.h"

namespace mla::mlactl {

Arrivals::Arrivals(ArrivalKind kind, double rate_per_s, uint64_t seed, Clock::time_point begin)
    : kind_(kind), rate_per_s_(rate_per_s), begin_(begin), random_(seed), next_s_(Gap()) {}

double Arrivals::Gap() {
  if (kind_ == ArrivalKind::kUniform) return 1.0 / rate_per_s_;
  return std::exponential_distribution<double>(rate_per_s_)(random_);
}

std::optional<Arrivals::Clock::time_point> Arrivals::TakeBefore(Clock::time_point end) {
  const MutexLock lock(mutex_);
  const Clock::time_point next =
      begin_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(next_s_));
  if (next >= end) return std::nullopt;
  // From the sum, not from `next`: rounding to the clock's unit must not add up.
  next_s_ += Gap();
  return next;
}

}  // namespace mla::mlactl
