// The times of this machine's clocks as plain numbers, and their units. Threading: any thread.
#ifndef MLA_BASE_CLOCK_H_
#define MLA_BASE_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace mla {

constexpr int64_t kNanosPerMicro = 1'000;
constexpr int64_t kNanosPerMilli = 1'000'000;

template <typename Unit, typename Clock>
int64_t CountSinceEpoch() {
  return std::chrono::duration_cast<Unit>(Clock::now().time_since_epoch()).count();
}

// Returns the number of nanoseconds since an arbitrary moment. Never runs backwards.
inline int64_t SteadyNanos() {
  return CountSinceEpoch<std::chrono::nanoseconds, std::chrono::steady_clock>();
}

// Returns the time since 1970 in UTC. It jumps where the machine's clock is set.
inline int64_t UnixNanos() {
  return CountSinceEpoch<std::chrono::nanoseconds, std::chrono::system_clock>();
}
inline int64_t UnixMillis() {
  return CountSinceEpoch<std::chrono::milliseconds, std::chrono::system_clock>();
}

}  // namespace mla

#endif  // MLA_BASE_CLOCK_H_
