// Makes the gRPC channels of a client, with credentials and transport options.
#ifndef MLA_CLIENT_CPP_CHANNEL_H_
#define MLA_CLIENT_CPP_CHANNEL_H_

#include <grpcpp/channel.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace mla::client {

// Makes a channel each time; each has its own connection, made when it is first used.
using ChannelMaker = std::function<std::shared_ptr<grpc::Channel>()>;

// Makes a maker of channels to a target. Reads the PEM files. INVALID_ARGUMENT if one cannot be
// read, or if a socket's path has a comma. All other characters of a path stand for themselves.
absl::StatusOr<ChannelMaker> ChannelMakerOf(const std::string& target,
                                            const ClientOptions& options);

// Returns true if the target is on this host: a unix socket, or only loopback addresses.
bool IsLocalTarget(const std::string& target);

// Returns the path of the socket that a unix target names; empty for other targets.
std::string UnixPathOf(const std::string& target);
// Returns the path of the socket through which a unix target's server gives shared memory; empty
// for other targets.
std::string ShmPathOf(const std::string& target);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CHANNEL_H_
