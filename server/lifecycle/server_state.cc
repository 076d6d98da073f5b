#include "server/lifecycle/server_state.h"

#include "server/logging/logging.h"

namespace mla::server {

const char* PhaseName(Phase phase) {
  static constexpr const char* kNames[] = {"",        "starting", "warming",
                                           "serving", "draining", "stopped"};
  return kNames[static_cast<int>(phase)];
}

void ServerState::Move(Phase phase, int32_t percent, const std::string& message) {
  {
    const MutexLock lock(mutex_);
    if (phase < now_.phase) return;
    const bool same = phase == now_.phase;
    if (same && percent == now_.percent && message == now_.message) return;
    now_.phase = phase;
    now_.percent = percent;
    now_.message = message;
    ++now_.version;
    changed_.NotifyAll();
    if (same) return;
  }
  Log(LogLevel::kInfo, "state", {{"state", PhaseName(phase)}, {"message", message}});
}

void ServerState::Reopen(const std::string& message) {
  {
    const MutexLock lock(mutex_);
    if (now_.phase != Phase::kDraining) return;
    now_.phase = Phase::kServing;
    now_.percent = 100;
    now_.message = message;
    ++now_.version;
    changed_.NotifyAll();
  }
  Log(LogLevel::kInfo, "state", {{"state", PhaseName(Phase::kServing)}, {"message", message}});
}

void ServerState::SetHealth(bool healthy, const std::string& why) {
  {
    const MutexLock lock(mutex_);
    if (now_.lost || now_.healthy == healthy) return;
    now_.healthy = healthy;
    now_.message = now_.why_unhealthy = why;
    now_.unhealthy_since = std::chrono::steady_clock::now();
    ++now_.version;
    changed_.NotifyAll();
  }
  Log(healthy ? LogLevel::kInfo : LogLevel::kError, "health", {{"healthy", healthy}, {"why", why}});
}

void ServerState::SetLost(const std::string& why) {
  {
    const MutexLock lock(mutex_);
    if (now_.lost) return;
    if (now_.healthy) now_.unhealthy_since = std::chrono::steady_clock::now();
    now_.healthy = false;
    now_.lost = true;
    now_.message = now_.why_unhealthy = why;
    ++now_.version;
    changed_.NotifyAll();
  }
  Log(LogLevel::kError, "health", {{"healthy", false}, {"lost", true}, {"why", why}});
}

ServerState::Snapshot ServerState::Get() const {
  const MutexLock lock(mutex_);
  return now_;
}

ServerState::Snapshot ServerState::WaitForChange(uint64_t version,
                                                 std::chrono::milliseconds timeout) const {
  MutexLock lock(mutex_);
  changed_.WaitFor(lock, timeout,
                   [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return now_.version != version; });
  return now_;
}

}  // namespace mla::server
