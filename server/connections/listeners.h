// Builds the gRPC server: its addresses, credentials and limits.
#ifndef MLA_SERVER_CONNECTIONS_LISTENERS_H_
#define MLA_SERVER_CONNECTIONS_LISTENERS_H_

#include <grpcpp/server.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/attend/attention_service.h"
#include "server/config/config.h"
#include "server/connections/connection_acceptor.h"
#include "server/connections/tls_files.h"
#include "server/connections/undecodable.h"
#include "server/grpc/completion_poller.h"
#include "server/lifecycle/health_service.h"

namespace mla::server {

struct Listeners {
  std::unique_ptr<CompletionPoller> poller;  // outlives the server's calls; stop it after them
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<ConnectionAcceptor> acceptor;  // stop it before the server
  int tcp_port = 0;                              // 0: no TCP listener
  std::string unix_path;                         // empty: no unix socket
  bool introspection = false;                    // reflection and channelz are served
};

// Returns the unix socket's path with "auto" resolved by this process's environment, or empty
// without a socket.
std::string ServedUnixPath(const Config& config);

// The services to serve; all of them outlive the listeners.
struct Services {
  AttentionService* attention = nullptr;
  HealthService* health = nullptr;
  std::vector<grpc::Service*> control;
  std::shared_ptr<TlsFiles> tls;                // null: without TLS
  UndecodableCounter on_undecodable;            // see InterceptUndecodable
  std::function<void()> on_connection_refused;  // for connections beyond a bound
};

// Starts serving `services` on every address of `config`; streams and health use a poller of
// `polling`. Every limit of the transport is set explicitly. UNAVAILABLE if an address cannot be
// bound.
absl::StatusOr<Listeners> Listen(const Config& config, const CompletionPollerOptions& polling,
                                 const Services& services);

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_LISTENERS_H_
