// The gRPC channel of a client: credentials and transport options.
#ifndef MLA_CLIENT_CPP_CHANNEL_H_
#define MLA_CLIENT_CPP_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace mla::client {

// A channel that connects when it is first used. INVALID_ARGUMENT when a PEM file cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& target,
                                                           const ClientOptions& options);

// Of the socket that a unix target names; empty for other targets.
std::string UnixPathOf(const std::string& target);
// Where a unix target's server hands out shared memory; empty for other targets.
std::string ShmPathOf(const std::string& target);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CHANNEL_H_
