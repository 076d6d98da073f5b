// Bounds the calls that send events until their client ends them or the server stops. Each such
// call holds a control thread, so all of them together are bounded; one tenant may have half of the
// bound.
//
// Threading: any thread.
#ifndef MLA_SERVER_LIFECYCLE_WATCHERS_H_
#define MLA_SERVER_LIFECYCLE_WATCHERS_H_

#include <grpcpp/server_context.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "server/lifecycle/server_state.h"

namespace mla::server {

class Watchers final {
 public:
  // At most `limit` calls may watch at a time (wire.max_watchers). `state` must outlive this
  // object.
  Watchers(const ServerState* state, int32_t limit) : state_(state), limit_(limit) {}

  // The place of one watching call; the destructor returns it.
  class Place final {
   public:
    Place(Watchers* watchers, std::string tenant);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    // RESOURCE_EXHAUSTED with reason "too_many_watchers" if there was no place; the call, whose
    // name is `call`, must then end.
    absl::Status Check(const char* call) const;

   private:
    Watchers* const watchers_;
    const std::string tenant_;
    bool taken_ = false;
  };

  const ServerState& state() const { return *state_; }
  // Waits for `pause`, or until the call is over if that comes first: its client has ended it, or
  // the server stops. Returns true if it is over.
  bool OverAfter(const grpc::ServerContext& call, std::chrono::milliseconds pause) const;

 private:
  const ServerState* const state_;
  const int32_t limit_;
  Mutex mutex_;
  int32_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int32_t> of_tenant_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_WATCHERS_H_
