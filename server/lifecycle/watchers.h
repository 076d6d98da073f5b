// Calls that send what happens until their client ends them or the server stops. Each holds a
// control thread, so there is a bound on all of them together.
//
// Threading: any thread.
#ifndef MLA_SERVER_LIFECYCLE_WATCHERS_H_
#define MLA_SERVER_LIFECYCLE_WATCHERS_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "server/lifecycle/server_state.h"

namespace mla::server {

class Watchers final {
 public:
  // At most `most` at a time: wire.max_watchers. `state` outlives this.
  Watchers(const ServerState* state, int32_t most) : state_(state), most_(most) {}

  // A call's place; gives it back.
  class Place final {
   public:
    explicit Place(Watchers* watchers) : watchers_(watchers) {}
    ~Place() { watchers_->open_.fetch_sub(1); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // RESOURCE_EXHAUSTED with reason "too_many_watchers": the call, named `call`, has to end.
    absl::Status Check(const char* call);

   private:
    Watchers* const watchers_;
    const int32_t before_ = watchers_->open_.fetch_add(1);
  };

  const ServerState& state() const { return *state_; }
  // Waits for so long, and less if the call is over: its client has ended it, or the server stops.
  bool OverAfter(const grpc::ServerContext& call, std::chrono::milliseconds pause) const;

 private:
  const ServerState* const state_;
  const int32_t most_;
  std::atomic<int32_t> open_{0};
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_WATCHERS_H_
