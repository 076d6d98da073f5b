#include "base/pauses.h"

#include <sys/prctl.h>

#include <utility>

namespace mla {

PauseWatch::PauseWatch(std::function<int64_t()> now) : now_(std::move(now)), beat_(now_()) {}

PauseWatch::~PauseWatch() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  stopping_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void PauseWatch::Start() {
  thread_ = std::thread([this] {
    MutexLock lock(mutex_);
    while (!stopping_.WaitFor(lock, std::chrono::nanoseconds(kBeatNanos),
                              [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; })) {
      Beat();
    }
  });
}

void PauseWatch::Beat() {
  const int64_t now = now_();
  const int64_t gap = now - beat_.exchange(now);
  if (gap > kLeastNanos) paused_ += gap;
}

int64_t PauseWatch::Take(int64_t now) {
  int64_t last = beat_.load();
  // The thread may come to it later than the caller does.
  while (now - last > kLeastNanos) {
    if (!beat_.compare_exchange_weak(last, now)) continue;
    paused_ += now - last;
    break;
  }
  return paused_.load() == 0 ? 0 : paused_.exchange(0);
}

void Nap(std::chrono::nanoseconds waited) {
  // A system that refuses it ends sleeps late, as it does without the call.
  [[maybe_unused]] thread_local const int asked = prctl(PR_SET_TIMERSLACK, 1UL);
  std::this_thread::sleep_for(std::chrono::nanoseconds(NapNanos(waited.count())));
}

}  // namespace mla
