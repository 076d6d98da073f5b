// Implements the Transports service: rings that travel over UCX. Starts a relay for each call and
// ends it with the call.
//
// Threading: any thread; a call holds its thread until the ring ends. Offer and Withdraw from the
// thread that starts and stops the server.
#ifndef MLA_SERVER_UCX_TRANSPORT_SERVICE_H_
#define MLA_SERVER_UCX_TRANSPORT_SERVICE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "mla/v1/transport.grpc.pb.h"
#include "server/config/config.h"
#include "server/control/rpc_context.h"
#include "server/lifecycle/server_state.h"
#include "server/lifecycle/watchers.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "server/ucx/relay_process.h"

namespace mla::server {

struct TransportOptions {
  Config::Ucx ucx;
  std::string program;       // of relays; empty: this process's own
  int32_t ring_entries = 0;  // shm.ring_entries
  std::string gpu_library;   // of the GPU's runtime; empty: search for it
};

class TransportService final : public v1::Transports::Service {
 public:
  // If UCX is to be offered, starts a relay to see if it can be used, and logs the result. `state`
  // outlives the service.
  TransportService(const RpcContext& rpc, TransportOptions options, const ServerState* state);

  // Returns true if UCX is offered and can be used here.
  bool usable() const { return usable_.ok(); }
  // Connections are made through `listener` from now on; it must exist until Withdraw returns.
  // Null: rings are refused.
  void Offer(SharedMemoryListener* listener);
  void Withdraw() { Offer(nullptr); }

  grpc::Status OpenUcx(grpc::ServerContext* context, const v1::OpenUcxRequest* request,
                       grpc::ServerWriter<v1::OpenUcxReply>* writer) override;

 private:
  absl::Status Probe() const;
  relay::RelaySetup SetupOf(const v1::OpenUcxRequest& request) const;
  absl::StatusOr<std::unique_ptr<RelayProcess>> StartRelay(const Identity& who,
                                                           const relay::RelaySetup& setup);
  absl::Status Serve(grpc::ServerContext* context, const Identity& who,
                     const v1::OpenUcxRequest& request,
                     grpc::ServerWriter<v1::OpenUcxReply>* writer);
  // Waits until the call is over, or the relay has ended, and then returns the relay's reason.
  // Counts both cases.
  std::optional<absl::Status> Watch(grpc::ServerContext* context, RelayProcess* relay);

  const RpcContext rpc_;
  const TransportOptions options_;
  const std::string program_;
  Watchers sessions_;
  absl::Status usable_;
  Mutex mutex_;
  SharedMemoryListener* listener_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace mla::server

#endif  // MLA_SERVER_UCX_TRANSPORT_SERVICE_H_
