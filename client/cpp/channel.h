// Makes the gRPC channels of a client, with its transport options.
#ifndef MLA_CLIENT_CPP_CHANNEL_H_
#define MLA_CLIENT_CPP_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace mla::client {

// The pause between two attempts to connect begins at the first of these, and grows with each
// attempt up to the second, both by a fifth more or less. An attempt ends after the third: a server
// that is busy may take a while to answer, but packets to one that has vanished get no answer.
// Linux sends the first packet of an attempt again after each of the first four seconds, and later
// after pauses that double.
inline constexpr int kLeastBackoffMs = 100;
inline constexpr int kLongestBackoffMs = 1000;
inline constexpr int kConnectMs = 5000;

// Makes a channel each time; each has its own connection, made when it is first used.
using ChannelMaker =
    std::function<std::shared_ptr<grpc::Channel>(std::shared_ptr<grpc::ChannelCredentials>)>;

// Makes a maker of channels to a target. INVALID_ARGUMENT if a socket's path has a comma. All other
// characters of a path stand for themselves.
absl::StatusOr<ChannelMaker> ChannelMakerOf(const std::string& target,
                                            const ClientOptions& options);

// Returns the transport options of channels to a target.
grpc::ChannelArguments ChannelArgumentsOf(const std::string& target, const ClientOptions& options);

// Returns true if the target is on this host: a unix socket, or only loopback addresses.
bool IsLocalTarget(const std::string& target);

// Returns the path of the socket that a unix target names; empty for other targets.
std::string UnixPathOf(const std::string& target);
// Returns the path of the socket through which a unix target's server gives shared memory; empty
// for other targets.
std::string ShmPathOf(const std::string& target);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CHANNEL_H_
