#include "server/drain.h"

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "server/logging.h"

namespace mla::server {
namespace {

using std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kReport = std::chrono::seconds(1);

std::string Waiting(const scheduler::EngineStats& stats) {
  return absl::StrCat("waiting for ", stats.open_steps, " open steps, ",
                      stats.requests_waiting + stats.requests_running, " requests");
}

}  // namespace

DrainResult Drain::Run(std::chrono::milliseconds deadline) {
  std::unique_lock lock(mutex_);
  end_ = std::min(end_, steady_clock::now() + deadline);
  changed_.notify_all();  // a drain that runs has a new end
  if (running_) {
    changed_.wait(lock, [this] { return result_.has_value(); });
    return *result_;
  }
  running_ = true;
  lock.unlock();
  const DrainResult result = WaitForSteps();
  lock.lock();
  result_ = result;
  changed_.notify_all();
  return result;
}

DrainResult Drain::WaitForSteps() {
  engine_->StartDrain();
  state_->Move(Phase::kDraining, 0, "drain begun");
  auto report = steady_clock::now();
  int32_t most = 1;
  DrainResult result;
  for (;;) {
    const scheduler::EngineStats stats = engine_->Stats();
    most = std::max(most, stats.open_steps);
    if (stats.open_steps == 0) {
      result.drained = true;
      result.message = "no step was open";
      break;
    }
    state_->Move(Phase::kDraining, 100 * (most - stats.open_steps) / most, Waiting(stats));
    if (steady_clock::now() >= report) {
      Log(LogLevel::kInfo, "drain", {{"message", Waiting(stats)}});
      report = steady_clock::now() + kReport;
    }
    std::unique_lock lock(mutex_);
    if (steady_clock::now() >= end_) break;
    changed_.wait_until(lock, std::min(end_, steady_clock::now() + kPoll));
  }
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
