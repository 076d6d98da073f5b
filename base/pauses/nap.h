// Short sleeps between two checks of a condition that comes without a signal, such as a word that a
// GPU writes.
#ifndef MLA_BASE_PAUSES_NAP_H_
#define MLA_BASE_PAUSES_NAP_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace mla {

inline constexpr int64_t kShortestNapNanos = 5'000;
inline constexpr int64_t kLongestNapNanos = 50'000;

// Returns how long to sleep after having waited for `waited` nanoseconds: an eighth of it, within
// the two bounds. So the check after the nap is late by little of the wait, and long waits need few
// checks.
constexpr int64_t NapNanos(int64_t waited) {
  return std::clamp(waited / 8, kShortestNapNanos, kLongestNapNanos);
}

// Sleeps for NapNanos(waited). The first call of a thread asks the kernel to end this thread's
// sleeps on time; by default it may end each one 50 us late. Any thread.
void Nap(std::chrono::nanoseconds waited);

}  // namespace mla

#endif  // MLA_BASE_PAUSES_NAP_H_
