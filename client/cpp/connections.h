// The connections of one client: one for unary calls, which must not wait for streams that stay
// open, and others that carry a fixed number of streams each.
//
// Over TLS a call or stream that begins after a change of the PEM files gets a new connection with
// the new certificates (tls_files.h). Calls and streams from before end on the connection on which
// they have begun, which lives as long as they do.
//
// A connection that has broken is made again while calls and streams begin: gRPC notices that an
// attempt to connect has ended only while a thread waits for something, else every 5 s. So a call
// or stream that finds its connection broken waits for up to kReconnectWait.
//
// Threading: any thread. One mutex, which is held while files are read.
#ifndef MLA_CLIENT_CPP_CONNECTIONS_H_
#define MLA_CLIENT_CPP_CONNECTIONS_H_

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/channel.h"
#include "client/cpp/client.h"
#include "client/cpp/tls_files.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/cache.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"

namespace mla::client {

// By default a server allows 128 calls on one connection (wire.connection_streams).
inline constexpr int kStreamsAConnection = 8;

// A call or stream waits for this time for a connection that has broken, before it fails.
inline constexpr std::chrono::milliseconds kReconnectWait(100);

// One connection for unary calls, and the stubs that use it.
struct CallConnection {
  CallConnection(std::shared_ptr<grpc::ChannelCredentials> with,
                 std::shared_ptr<grpc::Channel> over);

  const std::shared_ptr<grpc::ChannelCredentials> credentials;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Admin::Stub> admin;
  const std::unique_ptr<v1::Models::Stub> models;
  const std::unique_ptr<v1::Sequences::Stub> sequences;
  const std::unique_ptr<v1::Cache::Stub> cache;
};

// One connection that carries streams, and their number.
struct StreamCarrier {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::shared_ptr<grpc::Channel> channel;
  std::atomic<int> streams{0};
};

class Connections final {
 public:
  // Connects nothing yet. INVALID_ARGUMENT names an option of TLS that is missing or a file that
  // cannot be used, or says that a socket's path has a comma.
  static absl::StatusOr<std::unique_ptr<Connections>> Create(const std::string& target,
                                                             const ClientOptions& options);

  // Returns the connection for a call that begins now. Waits for at most `wait` if it has broken.
  std::shared_ptr<const CallConnection> ForCall(std::chrono::milliseconds wait = kReconnectWait);
  // Returns a carrier with room for one more stream, and counts that stream. The caller takes it
  // off `streams` when it has ended. May wait for kReconnectWait.
  std::shared_ptr<StreamCarrier> ForStream();

 private:
  Connections(ChannelMaker make, std::unique_ptr<TlsFiles> files);
  std::shared_ptr<const CallConnection> Calls();
  std::shared_ptr<StreamCarrier> TakeCarrier();
  std::shared_ptr<grpc::ChannelCredentials> Credentials() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ChannelMaker make_;
  Mutex mutex_;
  const std::unique_ptr<TlsFiles> files_ ABSL_PT_GUARDED_BY(mutex_);  // null: without TLS
  const std::shared_ptr<grpc::ChannelCredentials> insecure_;          // used without TLS
  std::shared_ptr<const CallConnection> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<StreamCarrier>> carriers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CONNECTIONS_H_
