#include "server/watchdog.h"

#include <string>
#include <utility>

namespace mla::server {

Watchdog::Watchdog(std::function<absl::Status()> probe, ServerState* state,
                   std::chrono::milliseconds silence, std::chrono::milliseconds period)
    : probe_(std::move(probe)),
      state_(state),
      silence_(silence),
      period_(period),
      heard_(std::chrono::steady_clock::now()),
      asking_([this] { Ask(); }),
      looking_([this] { Look(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    stopped_.notify_all();
  }
  asking_.join();
  looking_.join();
}

bool Watchdog::Sleep() {
  std::unique_lock lock(mutex_);
  return !stopped_.wait_for(lock, period_, [this] { return stop_; });
}

void Watchdog::Ask() {
  do {
    absl::Status status = probe_();
    const std::lock_guard lock(mutex_);
    last_ = std::move(status);
    heard_ = std::chrono::steady_clock::now();
  } while (Sleep());
}

void Watchdog::Look() {
  while (Sleep()) {
    absl::Status status;
    std::chrono::steady_clock::time_point heard;
    {
      const std::lock_guard lock(mutex_);
      status = last_;
      heard = heard_;
    }
    if (std::chrono::steady_clock::now() - heard > silence_) {
      state_->SetHealth(false, "the engine gives no sign of life");
    } else if (!status.ok()) {
      state_->SetHealth(false, std::string(status.message()));
    } else {
      state_->SetHealth(true, "");
    }
  }
}

}  // namespace mla::server
