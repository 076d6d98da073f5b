// The gRPC channel of a client: credentials and transport options.
#ifndef MLA_CLIENT_CPP_CHANNEL_H_
#define MLA_CLIENT_CPP_CHANNEL_H_

#include <grpcpp/channel.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace mla::client {

// Makes channels, each a connection of its own from its first use on.
using ChannelMaker = std::function<std::shared_ptr<grpc::Channel>()>;

// Channels to a target. The PEM files are read here. INVALID_ARGUMENT when one cannot be read, or
// for a socket's path with a comma; other characters of a path mean themselves.
absl::StatusOr<ChannelMaker> ChannelMakerOf(const std::string& target,
                                            const ClientOptions& options);

// Returns true for a socket of this host: a unix target, or loopback addresses alone.
bool IsLocalTarget(const std::string& target);

// Path of the socket that a unix target names; empty for other targets.
std::string UnixPathOf(const std::string& target);
// Path of the socket through which a unix target's server gives shared memory; empty for other
// targets.
std::string ShmPathOf(const std::string& target);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CHANNEL_H_
