// Time in which this process did not run: it was stopped (SIGSTOP, a paused container, a migrated
// machine), or the machine gave it no time. A thread of its own notes the time again and again; a
// gap in its notes is a pause.
//
// Messages that others sent during a pause wait in sockets, so their deadlines may not count the
// pause.
//
// Threading: any thread.
#ifndef MLA_BASE_PAUSES_PAUSE_WATCH_H_
#define MLA_BASE_PAUSES_PAUSE_WATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla {

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

}  // namespace mla

#endif  // MLA_BASE_PAUSES_PAUSE_WATCH_H_
