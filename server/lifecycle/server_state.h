// The server's state machine; threads can wait for it to change.
//
//   Starting -> Warming -> Serving -> Draining -> Stopped
//
// States only move forward, except that a drain may be cancelled. The Serving state is healthy or
// not: it is unhealthy while the engine does not answer, and for good once the device is lost.
//
// Threading: all methods from any thread.
#ifndef MLA_SERVER_LIFECYCLE_SERVER_STATE_H_
#define MLA_SERVER_LIFECYCLE_SERVER_STATE_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::server {

enum class Phase { kStarting = 1, kWarming, kServing, kDraining, kStopped };

const char* PhaseName(Phase phase);  // "starting", ...

class ServerState final {
 public:
  struct Snapshot {
    Phase phase = Phase::kStarting;
    int32_t percent = 0;  // of warm-up or drain
    std::string message;  // the reason for waiting, or the latest fault
    bool healthy = true;
    bool lost = false;  // not healthy, and only a new process can be
    // Valid while the server is not healthy.
    std::string why_unhealthy;
    std::chrono::steady_clock::time_point unhealthy_since;
    uint64_t version = 0;  // grows with every change
    // Returns true if the server takes new work.
    bool serving() const { return phase == Phase::kServing && healthy; }
  };

  // Moves to a later phase. Does nothing if `phase` is an earlier one.
  void Move(Phase phase, int32_t percent, const std::string& message);
  // Moves from Draining back to Serving. Does nothing in other phases.
  void Reopen(const std::string& message);
  // Sets the health of the device. Does nothing if the device is lost or nothing changes.
  void SetHealth(bool healthy, const std::string& why);
  void SetLost(const std::string& why);
  Snapshot Get() const;
  // Returns the first snapshot newer than `version`, or after `timeout` the present one.
  Snapshot WaitForChange(uint64_t version, std::chrono::milliseconds timeout) const;

 private:
  mutable Mutex mutex_;
  mutable CondVar changed_;
  Snapshot now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_SERVER_STATE_H_
