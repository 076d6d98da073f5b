// Keeps the settings that a reload replaces while services read them. A reader sees all settings of
// one configuration or all of the next.
//
// Threading: all methods from any thread.
#ifndef MLA_SERVER_RELOAD_LIVE_SETTINGS_H_
#define MLA_SERVER_RELOAD_LIVE_SETTINGS_H_

#include <chrono>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "scheduler/engine.h"
#include "server/config/config.h"
#include "server/grpc/identity.h"

namespace mla::server {

class LiveSettings final {
 public:
  void Set(const Config& config);
  // Does what CheckOperator of identity.h does, by the policy in force.
  absl::Status CheckOperator(const Identity& who) const;
  scheduler::DefaultLeases leases() const;
  std::chrono::milliseconds restart_after() const;  // server.restart_after_ms; 0: never
  // Returns server.drain_deadline_ms, of drains that name no deadline.
  std::chrono::milliseconds drain_deadline() const;

  // Sets the reason why the configuration on disk is not in use; empty if it is in use.
  void SetRefusal(const std::string& why);
  std::string refusal() const;

 private:
  mutable Mutex mutex_;
  OperatorPolicy operators_ ABSL_GUARDED_BY(mutex_);
  scheduler::DefaultLeases leases_ ABSL_GUARDED_BY(mutex_);
  std::chrono::milliseconds restart_after_ ABSL_GUARDED_BY(mutex_){0};
  std::chrono::milliseconds drain_deadline_ ABSL_GUARDED_BY(mutex_){0};
  std::string refusal_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_RELOAD_LIVE_SETTINGS_H_
