// Opens a command ring over UCX: calls Transports.OpenUcx and keeps that call as long as the ring.
#ifndef MLA_CLIENT_CPP_UCX_UCX_SESSION_H_
#define MLA_CLIENT_CPP_UCX_UCX_SESSION_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/ucx/ucx_memory.h"

namespace mla::client {

struct UcxSessionOptions {
  std::string tenant;  // sent without TLS only; empty: the server's default
  uint64_t bytes = 0;  // for tensors
  uint64_t boot_id = 0;
  std::chrono::milliseconds timeout{10000};  // of opening
  UcxMemoryOptions memory;                   // its `spin` is asked of the server, too
};

// UNAVAILABLE: this process cannot use UCX. Otherwise errors are the server's. ABORTED: the server
// has another boot id. The object has a thread that waits for the end of the call.
absl::StatusOr<std::unique_ptr<UcxMemory>> OpenUcxRing(std::shared_ptr<grpc::Channel> channel,
                                                       const UcxSessionOptions& options);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_UCX_UCX_SESSION_H_
