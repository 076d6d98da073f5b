#include "server/lifecycle/idle_calls.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {

IdleCalls::IdleCalls(std::chrono::milliseconds idle) : idle_(idle), thread_([this] { Watch(); }) {}

IdleCalls::~IdleCalls() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  stopping_.NotifyAll();
  thread_.join();
}

void IdleCalls::Waits(grpc::ServerContext* call) {
  const MutexLock lock(mutex_);
  watched_[call].heard = Clock::now();
}

void IdleCalls::Works(grpc::ServerContext* call) {
  const MutexLock lock(mutex_);
  watched_[call].heard = Clock::time_point::max();
}

absl::Status IdleCalls::End(grpc::ServerContext* call, const absl::Status& status) {
  bool cancelled = false;
  {
    const MutexLock lock(mutex_);
    const auto found = watched_.find(call);
    cancelled = found != watched_.end() && found->second.cancelled;
    watched_.erase(call);
  }
  if (!cancelled) return status;
  return MakeError(
      absl::StatusCode::kDeadlineExceeded,
      absl::StrCat("the client has neither sent nor taken anything for ", idle_.count(), " ms"),
      {.reason = "upload_idle"});
}

void IdleCalls::Watch() {
  const auto period = std::clamp<std::chrono::milliseconds>(
      idle_ / 4, std::chrono::milliseconds(10), std::chrono::milliseconds(1000));
  MutexLock lock(mutex_);
  while (!stopping_.WaitFor(lock, period,
                            [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; })) {
    const Clock::time_point now = Clock::now();
    for (auto& [call, watched] : watched_) {
      if (watched.cancelled || watched.heard == Clock::time_point::max() ||
          now - watched.heard < idle_) {
        continue;
      }
      watched.cancelled = true;
      call->TryCancel();
    }
  }
}

}  // namespace mla::server
