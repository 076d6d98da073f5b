// Watches the engine: probes it, turns health off when it does not answer, off for good when it
// reports that its backend can run no more, and keeps its last answer for callers that must not
// wait for a launch. Where a call to the backend never returns, it ends the process: nothing that
// the process could do for itself would end that call, and clients wait.
//
// Two threads, because a probe hangs if the engine does: one probes, the other looks at the clock.
// Threading: construct and destroy from one thread, Stats and SetTimeout from any. The destructor
// waits for the probe.
#ifndef MLA_SERVER_LIFECYCLE_WATCHDOG_H_
#define MLA_SERVER_LIFECYCLE_WATCHDOG_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "scheduler/engine.h"
#include "server/lifecycle/server_state.h"

namespace mla::server {

struct Heartbeat {
  absl::Status health;  // an error is for good: kernels/attention_backend.h
  scheduler::EngineStats stats;
};

// Calls to the backend that never return.
struct StuckCalls {
  std::function<std::string()> look;                // Engine::StuckCall; any thread, must not block
  std::function<void(const std::string& why)> end;  // the process
};

class Watchdog final {
 public:
  // How long Stats waits for an engine that is busy.
  static constexpr std::chrono::milliseconds kAnswerWait{250};

  // `probe` queries the engine and may block. `state` outlives the watchdog. `stuck`: null
  // functions look at nothing.
  Watchdog(std::function<Heartbeat()> probe, ServerState* state, std::chrono::milliseconds timeout,
           std::chrono::milliseconds period, StuckCalls stuck = {});
  ~Watchdog();

  // In force from the next look at the clock on.
  void SetTimeout(std::chrono::milliseconds timeout);

  // The engine's stats as of now, or the last ones when it does not answer in time: then
  // one call waits for kAnswerWait, and those behind it for what is left of that.
  scheduler::EngineStats Stats();

 private:
  using Clock = std::chrono::steady_clock;

  void ProbeLoop();
  void CheckLoop();

  const std::function<Heartbeat()> probe_;
  const StuckCalls stuck_;
  ServerState* const state_;
  const std::chrono::milliseconds period_;
  Mutex mutex_;
  std::chrono::milliseconds timeout_ ABSL_GUARDED_BY(mutex_);
  CondVar wake_;      // a caller needs an answer, or the end has come
  CondVar answered_;  // there is one
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t started_ ABSL_GUARDED_BY(mutex_) = 0;   // probes begun
  uint64_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;    // of those, the last that a caller waits for
  uint64_t finished_ ABSL_GUARDED_BY(mutex_) = 0;  // probes ended; started_ or one less
  Clock::time_point begun_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point answered_at_ ABSL_GUARDED_BY(mutex_);
  scheduler::EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::thread prober_, checker_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_WATCHDOG_H_
