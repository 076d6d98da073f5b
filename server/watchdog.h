// Watches the engine: asks it for a sign of life and turns health off when it fails or falls
// silent.
//
// Two threads, because a hung engine hangs whoever asks it: one asks, the other looks at the clock.
// Threading: construct and destroy from one thread. The destructor waits for the probe.
#ifndef MLA_SERVER_WATCHDOG_H_
#define MLA_SERVER_WATCHDOG_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "absl/status/status.h"
#include "server/server_state.h"

namespace mla::server {

class Watchdog final {
 public:
  // `probe` returns the engine's health; it may block. `state` outlives the watchdog.
  Watchdog(std::function<absl::Status()> probe, ServerState* state,
           std::chrono::milliseconds silence, std::chrono::milliseconds period);
  ~Watchdog();

 private:
  void Ask();
  void Look();
  bool Sleep();  // false: stop

  const std::function<absl::Status()> probe_;
  ServerState* const state_;
  const std::chrono::milliseconds silence_, period_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  absl::Status last_;
  std::chrono::steady_clock::time_point heard_;
  std::thread asking_, looking_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_WATCHDOG_H_
