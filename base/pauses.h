// Pauses of this process, which it finds out about, and of a thread, which it takes.
#ifndef MLA_BASE_PAUSES_H_
#define MLA_BASE_PAUSES_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla {

// Time in which this process did not run: it was stopped (SIGSTOP, a paused container, a migrated
// machine), or the machine gave it no time. A thread of its own notes the time again and again; a
// gap in its notes is a pause.
//
// Messages that others sent during a pause wait in sockets, so their deadlines may not count the
// pause.
//
// Threading: any thread.
class PauseWatch final {
 public:
  // The time is noted at this interval, which is also the shortest gap that counts as a pause: a
  // busy machine is late by less.
  static constexpr int64_t kBeatNanos = 100'000'000;
  static constexpr int64_t kLeastNanos = 4 * kBeatNanos;

  // `now`: nanoseconds of a clock that goes on during pauses; any thread.
  explicit PauseWatch(std::function<int64_t()> now);
  ~PauseWatch();
  PauseWatch(const PauseWatch&) = delete;
  PauseWatch& operator=(const PauseWatch&) = delete;

  // Starts the thread. Without it, Beat is called by hand.
  void Start();
  // Notes the time.
  void Beat();
  // Returns the number of nanoseconds of pauses since the last call, one that ended just before
  // `now` included; mostly 0. `now` is a time of the watch's clock that the caller has read;
  // callers on the path of a launch need the time anyway, and reading a clock costs as much as the
  // rest of the call.
  int64_t Take(int64_t now);

 private:
  const std::function<int64_t()> now_;
  std::atomic<int64_t> beat_;
  std::atomic<int64_t> paused_{0};
  Mutex mutex_;
  CondVar stopping_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

inline constexpr int64_t kShortestNapNanos = 5'000;
inline constexpr int64_t kLongestNapNanos = 50'000;

// Returns how long to sleep after having waited for `waited` nanoseconds: an eighth of it, within
// the two bounds. So the check after the nap is late by little of the wait, and long waits need few
// checks.
constexpr int64_t NapNanos(int64_t waited) {
  return std::clamp(waited / 8, kShortestNapNanos, kLongestNapNanos);
}

// Sleeps for NapNanos(waited), between two checks of a condition that comes without a signal, such
// as a word that a GPU writes. The first call of a thread asks the kernel to end this thread's
// sleeps on time; by default it may end each one 50 us late. Any thread.
void Nap(std::chrono::nanoseconds waited);

}  // namespace mla

#endif  // MLA_BASE_PAUSES_H_
