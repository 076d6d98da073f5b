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
  std::string tenant;                        // sent without TLS only; empty: the server's default
  uint64_t bytes = 0;                        // for tensors
  uint64_t boot_id = 0;                      // the server must have this one; see ServerInfo
  std::chrono::milliseconds timeout{10000};  // of opening
  UcxMemoryOptions memory;                   // the server is asked to spin for as long
};

// Returns the ring, which keeps the call open: its thread waits for the end of the call.
// UNAVAILABLE if this process cannot use UCX, ABORTED if the server has another boot id; other
// errors are the server's.
absl::StatusOr<std::unique_ptr<UcxMemory>> OpenUcxRing(std::shared_ptr<grpc::Channel> channel,
                                                       const UcxSessionOptions& options);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_UCX_UCX_SESSION_H_
