#include "server/lifecycle/drain.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

using std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kReport = std::chrono::seconds(1);

std::string Waiting(const scheduler::EngineStats& stats) {
  return absl::StrCat("waiting for ", stats.open_steps, " open steps, ",
                      stats.requests_waiting + stats.requests_running, " requests");
}

const DrainResult kCancelled = {.cancelled = true,
                                .message = "cancelled: the server takes new work"};

}  // namespace

DrainResult Drain::Run(std::chrono::milliseconds deadline, bool for_good,
                       const DrainHandOver* hand_over) {
  MutexLock lock(mutex_);
  // If a drain is being cancelled, waits for its end.
  changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !cancel_; });
  if (hand_over != nullptr && running_) {
    DrainResult refused;
    refused.refused = true;
    return refused;
  }
  for_good_ = for_good_ || for_good;
  end_ = std::min(end_, steady_clock::now() + deadline);
  changed_.NotifyAll();  // a running drain gets a new deadline
  if (running_) {
    const uint64_t ended = cancelled_;
    changed_.Wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return result_.has_value() || cancelled_ != ended;
    });
    return result_.value_or(kCancelled);
  }
  running_ = true;
  lock.Unlock();
  DrainResult result = WaitForSteps(hand_over);
  lock.Lock();
  if (std::exchange(cancel_, false)) {
    result = kCancelled;
    Reopen();
  } else {
    result_ = result;
  }
  changed_.NotifyAll();
  return result;
}

bool Drain::Cancel() {
  MutexLock lock(mutex_);
  if (!running_ || for_good_) return false;
  if (result_.has_value()) {
    Reopen();
    return true;
  }
  const uint64_t ended = cancelled_;
  cancel_ = true;
  changed_.NotifyAll();
  changed_.Wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return cancelled_ != ended; });
  return true;
}

// REQUIRES: no thread is waiting for steps.
void Drain::Reopen() {
  running_ = false;
  result_.reset();
  end_ = steady_clock::time_point::max();
  ++cancelled_;
  engine_->CancelDrain();
  state_->Reopen("the drain was cancelled");
  Log(LogLevel::kInfo, "drain_cancelled", {});
}

DrainResult Drain::WaitForSteps(const DrainHandOver* hand_over) {
  engine_->StartDrain(hand_over == nullptr ? "" : hand_over->peer);
  state_->Move(Phase::kDraining, 0, "drain begun");
  if (hand_over != nullptr) hand_over->start();
  const absl::Cleanup stop = [&] {
    if (hand_over != nullptr) hand_over->stop();
  };
  auto report = steady_clock::now();
  int32_t most_steps = 1;
  DrainResult result;
  for (;;) {
    const scheduler::EngineStats stats = engine_->Stats();
    most_steps = std::max(most_steps, stats.open_steps);
    result.drained = stats.open_steps == 0;
    if (result.drained && (hand_over == nullptr || hand_over->done())) break;
    state_->Move(Phase::kDraining, 100 * (most_steps - stats.open_steps) / most_steps,
                 Waiting(stats));
    if (steady_clock::now() >= report) {
      Log(LogLevel::kInfo, "drain", {{"message", Waiting(stats)}});
      report = steady_clock::now() + kReport;
    }
    MutexLock lock(mutex_);
    if (cancel_) return result;
    if (steady_clock::now() >= end_) break;
    changed_.WaitUntil(lock, std::min(end_, steady_clock::now() + kPoll));
  }
  result.message = "no step was open";
  if (hand_over != nullptr) hand_over->stop();
  if (!result.drained) {
    result.aborted_steps = engine_->AbortAllSteps();
    result.message = absl::StrCat("deadline passed; ", result.aborted_steps, " steps aborted");
  }
  state_->Move(Phase::kDraining, 100, result.message);
  Log(result.drained ? LogLevel::kInfo : LogLevel::kWarning, "drained",
      {{"aborted_steps", result.aborted_steps}, {"message", result.message}});
  return result;
}

}  // namespace mla::server
