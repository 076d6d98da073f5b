// Accepts connections for gRPC and bounds their number: in all, for each peer, and by the
// descriptors that the process has left.
//
// gRPC 1.51 itself takes every connection. When the process is out of descriptors, its listener
// fails once and never accepts again. Here a connection beyond a bound is closed at once, and so is
// one whose descriptor lies in the reserve for probes (process_usage.h). The others are handed to
// gRPC, which owns them from then on; whether they are still open is read from the kernel.
//
// A peer is an address, or a user of the unix socket. Threading: one thread accepts; Listen*, Start
// and Stop from one thread.
#ifndef MLA_SERVER_CONNECTIONS_CONNECTION_ACCEPTOR_H_
#define MLA_SERVER_CONNECTIONS_CONNECTION_ACCEPTOR_H_

#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::server {

struct ConnectionBounds {
  int32_t max_connections = 4096;
  int32_t peer_connections = 1024;
  // A TCP peer that acknowledges nothing for this long counts as gone.
  int64_t unacknowledged_ms = 20000;
  std::function<void()> on_refused;  // called for every connection beyond a bound; may be empty
};

class ConnectionAcceptor final {
 public:
  using Handler = std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>;

  explicit ConnectionAcceptor(ConnectionBounds bounds) : bounds_(std::move(bounds)) {}
  ~ConnectionAcceptor() { Stop(); }

  // Binds every address that "host:port" resolves to and returns the port; port 0 means any free
  // one. UNAVAILABLE if one is in use or none can be bound.
  absl::StatusOr<int> ListenTcp(const std::string& address, Handler handler);
  // Replaces an existing socket file. UNAVAILABLE if it cannot be bound.
  absl::Status ListenUnix(const std::string& path, Handler handler);
  // Begins to accept. Connections made since Listen* are accepted first. UNAVAILABLE if the kernel
  // lacks the resources.
  absl::Status Start();
  // Stops accepting and closes the listening sockets. Connections that were handed over stay.
  void Stop();

 private:
  struct Listener {
    int descriptor = -1;
    grpc::experimental::ExternalConnectionAcceptor* handler = nullptr;
    bool tcp = false;
  };
  struct Connection {
    int descriptor = -1;
    // The kernel's number of the socket tells it from a later socket with the same descriptor.
    uint64_t cookie = 0;
    std::string peer;
  };

  void Run();
  void Accept(const Listener& listener);
  bool HasRoom(const std::string& peer);
  void ForgetClosed();
  void Refuse(const char* bound);
  void Watch(bool watch);

  const ConnectionBounds bounds_;
  std::vector<Handler> handlers_;
  std::vector<Listener> listeners_;
  std::string unix_path_;
  int events_ = -1, stop_event_ = -1;
  // Connections that may be open; used by the accepting thread only.
  std::vector<Connection> connections_;
  std::map<std::string, int32_t> of_peer_;  // connections of each peer; never 0
  int64_t forgot_ns_ = 0, refused_logged_ns_ = 0;
  uint64_t refused_unlogged_ = 0;
  bool paused_ = false;
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_CONNECTION_ACCEPTOR_H_
