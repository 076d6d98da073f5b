#include "server/drain.h"

#include <algorithm>
#include <thread>

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
  const std::lock_guard lock(mutex_);
  if (result_) return *result_;
  engine_->StartDrain();
  state_->Move(Phase::kDraining, 0, "drain begun");
  const auto begun = steady_clock::now();
  auto report = begun;
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
    const auto now = steady_clock::now();
    if (now - begun >= deadline) break;
    state_->Move(Phase::kDraining, 100 * (most - stats.open_steps) / most, Waiting(stats));
    if (now >= report) {
      Log(LogLevel::kInfo, "drain", {{"message", Waiting(stats)}});
      report = now + kReport;
    }
    std::this_thread::sleep_for(kPoll);
  }
  if (!result.drained) {
    result.aborted_steps = engine_->AbortAllSteps();
    result.message = absl::StrCat("deadline passed; ", result.aborted_steps, " steps aborted");
  }
  state_->Move(Phase::kDraining, 100, result.message);
  Log(result.drained ? LogLevel::kInfo : LogLevel::kWarning, "drained",
      {{"aborted_steps", absl::StrCat(result.aborted_steps)}, {"message", result.message}});
  result_ = result;
  return result;
}

}  // namespace mla::server
