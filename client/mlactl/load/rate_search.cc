#include "client/mlactl/load/rate_search.h"

namespace mla::mlactl {

std::optional<double> RateSearch::Next() const {
  const bool known = failed_ > 0 && failed_ - held_ <= kPrecision * failed_;
  if (known || runs_ == kMostRuns) return std::nullopt;
  return next_;
}

void RateSearch::Note(bool held) {
  ++runs_;
  if (held) held_ = next_;
  if (!held) failed_ = next_;
  // Steps of a half, because a rate far above the capacity takes the server long to work off.
  next_ = failed_ > 0 ? (held_ + failed_) / 2 : held_ * 1.5;
}

}  // namespace mla::mlactl
