// Watches the engine: probes it, and turns health off when it does not answer. Health goes off for
// good when the engine reports that its backend can run no more. It keeps the last answer for
// callers that must not wait for a launch. If a call to the backend never returns, it ends the
// process: the process has no other way to end that call, and clients wait.
//
// Two threads, because a probe hangs if the engine does: one probes, and the other watches the
// clock. Threading: construct and destroy it from one thread; call Stats and SetTimeout from any.
// The destructor
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
  absl::Status health;  // an error is permanent, see kernels/attention_backend.h
  scheduler::EngineStats stats;
};

// Finds calls to the backend that never return, and ends the process then.
struct StuckCalls {
  std::function<std::string()> look;                // Engine::StuckCall; any thread, must not block
  std::function<void(const std::string& why)> end;  // the process
};

class Watchdog final {
 public:
  // Stats waits this long for a busy engine.
  static constexpr std::chrono::milliseconds kAnswerWait{250};

  // `probe` queries the engine and may block. `state` must outlive the watchdog. `stuck`: functions
  // that are null are not called.
  Watchdog(std::function<Heartbeat()> probe, ServerState* state, std::chrono::milliseconds timeout,
           std::chrono::milliseconds period, StuckCalls stuck = {});
  ~Watchdog();

  // In force from the next look at the clock on.
  void SetTimeout(std::chrono::milliseconds timeout);

  // Returns the engine's present stats, or the last ones if it does not answer in time. One call
  // then waits for kAnswerWait, and later calls wait for the rest of that time.
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
  CondVar wake_;      // a caller needs an answer, or the threads must stop
  CondVar answered_;  // there is one
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t started_ ABSL_GUARDED_BY(mutex_) = 0;   // probes begun
  uint64_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;    // the latest probe that a caller waits for
  uint64_t finished_ ABSL_GUARDED_BY(mutex_) = 0;  // probes ended; equals started_ or is one less
  Clock::time_point begun_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point answered_at_ ABSL_GUARDED_BY(mutex_);
  scheduler::EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::thread prober_, checker_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_WATCHDOG_H_
