// The part of a bound of the server that a tenant may use by default.
#ifndef MLA_SCHEDULER_SHARE_OF_BOUND_H_
#define MLA_SCHEDULER_SHARE_OF_BOUND_H_

#include <cstdint>

namespace mla::scheduler {

// Returns so many eighths (ResourceRow::share_eighths) of a bound. Rounds up, so that a tenant that
// is alone on a server with room for two may have both.
inline constexpr int64_t ShareOfBound(int64_t bound, int64_t eighths) {
  constexpr int64_t kEighths = 8;
  return bound / kEighths * eighths + (bound % kEighths * eighths + kEighths - 1) / kEighths;
}

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_SHARE_OF_BOUND_H_
