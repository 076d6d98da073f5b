#include "server/lifecycle/watchdog.h"

#include <algorithm>
#include <string>
#include <utility>

namespace mla::server {

Watchdog::Watchdog(std::function<Heartbeat()> probe, ServerState* state,
                   std::chrono::milliseconds timeout, std::chrono::milliseconds period,
                   StuckCalls stuck)
    : probe_(std::move(probe)),
      stuck_(std::move(stuck)),
      state_(state),
      period_(period),
      timeout_(timeout),
      begun_(Clock::now()),
      answered_at_(begun_),
      prober_([this] { ProbeLoop(); }),
      checker_([this] { CheckLoop(); }) {}

Watchdog::~Watchdog() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    wake_.NotifyAll();
    answered_.NotifyAll();
  }
  prober_.join();
  checker_.join();
}

void Watchdog::ProbeLoop() {
  MutexLock lock(mutex_);
  while (!stop_) {
    const uint64_t number = ++started_;
    begun_ = Clock::now();
    lock.Unlock();
    Heartbeat heartbeat = probe_();
    // Done here and not by the checking thread, because no more work may go to a lost device.
    if (!heartbeat.health.ok()) state_->SetLost(std::string(heartbeat.health.message()));
    lock.Lock();
    stats_ = heartbeat.stats;
    answered_at_ = Clock::now();
    finished_ = number;
    answered_.NotifyAll();
    wake_.WaitFor(lock, period_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stop_ || wanted_ > started_;
    });
  }
}

void Watchdog::CheckLoop() {
  MutexLock lock(mutex_);
  while (!answered_.WaitFor(lock, period_,
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; })) {
    const bool missed = Clock::now() - answered_at_ > timeout_;
    lock.Unlock();
    state_->SetHealth(!missed, missed ? "no heartbeat from the engine" : "");
    if (stuck_.look != nullptr) {
      if (const std::string why = stuck_.look(); !why.empty()) stuck_.end(why);
    }
    lock.Lock();
  }
}

void Watchdog::SetTimeout(std::chrono::milliseconds timeout) {
  const MutexLock lock(mutex_);
  timeout_ = timeout;
}

scheduler::EngineStats Watchdog::Stats() {
  MutexLock lock(mutex_);
  // A probe that is running may have read its stats before the caller's last request, so wait for
  // the next one.
  const uint64_t wanted = started_ + 1;
  wanted_ = std::max(wanted_, wanted);
  wake_.NotifyAll();
  const bool under_way = started_ != finished_;
  answered_.WaitUntil(
      lock, (under_way ? begun_ : Clock::now()) + kAnswerWait,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || finished_ >= wanted; });
  return stats_;
}

}  // namespace mla::server
