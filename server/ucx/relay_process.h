// Starts, asks and ends a relay (relay_main.h), which is a process.
//
// Threading: one thread at a time for each object; different objects from any threads.
#ifndef MLA_SERVER_UCX_RELAY_PROCESS_H_
#define MLA_SERVER_UCX_RELAY_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "relay/relay_channel.h"

namespace mla::server {

class RelayProcess final {
 public:
  // Starts `program` as a relay, gives it `setup` and `ring` (a descriptor that the caller keeps;
  // -1: none), and waits for its reply, at most `timeout`. Returns the relay's error if it has one.
  // RESOURCE_EXHAUSTED: no process or descriptor is left. DEADLINE_EXCEEDED: no reply came in time.
  static absl::StatusOr<std::unique_ptr<RelayProcess>> Start(const std::string& program,
                                                             const relay::RelaySetup& setup,
                                                             int ring,
                                                             std::chrono::milliseconds timeout);
  // Ends the relay, and returns when the process is gone: within a second or two.
  ~RelayProcess();
  RelayProcess(const RelayProcess&) = delete;
  RelayProcess& operator=(const RelayProcess&) = delete;

  const relay::RelayReply& reply() const { return *reply_; }
  pid_t pid() const { return pid_; }
  // Waits for `pause`, or until the relay reports counts. Returns the reason if the relay has
  // ended, or is ending.
  std::optional<absl::Status> EndedAfter(std::chrono::milliseconds pause);
  // Asks the relay to end, and waits for its last counts.
  void Finish();
  // Returns the last counts that the relay has reported. They are not trusted: numbers may be
  // anything.
  const relay::RelayCounts& counts() const { return counts_; }

 private:
  RelayProcess() : reply_(std::make_unique<relay::RelayReply>()) {}
  absl::Status Spawn(const std::string& program, int ring);
  enum class Received : uint8_t { kNothing, kCounts, kReply };
  // If the relay has ended without a reply, sets the reply to UNAVAILABLE.
  Received Receive(std::chrono::milliseconds timeout);
  bool Gone(std::chrono::milliseconds wait);

  pid_t pid_ = -1;
  int control_ = -1;
  std::unique_ptr<relay::RelayReply> reply_;
  relay::RelayCounts counts_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_UCX_RELAY_PROCESS_H_
