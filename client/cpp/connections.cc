#include "client/cpp/connections.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::client {
namespace {

// Returns null if the options name no TLS.
absl::StatusOr<std::unique_ptr<TlsFiles>> FilesOf(const ClientOptions& options) {
  if (options.tls_ca.empty() && options.tls_cert.empty() && options.tls_key.empty()) return nullptr;
  for (const auto& [field, path] :
       {std::pair("tls_ca", &options.tls_ca), std::pair("tls_cert", &options.tls_cert),
        std::pair("tls_key", &options.tls_key)}) {
    if (path->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": got no path, must be set with the other files of TLS"));
    }
  }
  return TlsFiles::Open({options.tls_ca, options.tls_cert, options.tls_key}, "tls_");
}

void AwaitConnection(grpc::Channel& channel, std::chrono::milliseconds wait) {
  // A call waits by itself for an attempt that is under way.
  if (channel.GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_TRANSIENT_FAILURE) return;
  channel.WaitForConnected(std::chrono::system_clock::now() + wait);
}

}  // namespace

CallConnection::CallConnection(std::shared_ptr<grpc::ChannelCredentials> with,
                               std::shared_ptr<grpc::Channel> over)
    : credentials(std::move(with)),
      channel(std::move(over)),
      admin(v1::Admin::NewStub(channel)),
      models(v1::Models::NewStub(channel)),
      sequences(v1::Sequences::NewStub(channel)),
      cache(v1::Cache::NewStub(channel)) {}

absl::StatusOr<std::unique_ptr<Connections>> Connections::Create(const std::string& target,
                                                                 const ClientOptions& options) {
  MLA_ASSIGN_OR_RETURN(auto files, FilesOf(options));
  MLA_ASSIGN_OR_RETURN(auto make, ChannelMakerOf(target, options));
  return std::unique_ptr<Connections>(new Connections(std::move(make), std::move(files)));
}

Connections::Connections(ChannelMaker make, std::unique_ptr<TlsFiles> files)
    : make_(std::move(make)),
      files_(std::move(files)),
      insecure_(files_ == nullptr ? grpc::InsecureChannelCredentials() : nullptr) {}

std::shared_ptr<grpc::ChannelCredentials> Connections::Credentials() {
  return files_ == nullptr ? insecure_ : files_->Current();
}

std::shared_ptr<const CallConnection> Connections::ForCall(std::chrono::milliseconds wait) {
  std::shared_ptr<const CallConnection> connection = Calls();
  AwaitConnection(*connection->channel, wait);
  return connection;
}

std::shared_ptr<StreamCarrier> Connections::ForStream() {
  std::shared_ptr<StreamCarrier> carrier = TakeCarrier();
  AwaitConnection(*carrier->channel, kReconnectWait);
  return carrier;
}

std::shared_ptr<const CallConnection> Connections::Calls() {
  std::shared_ptr<const CallConnection> before;  // ends after the mutex is free
  const MutexLock lock(mutex_);
  const std::shared_ptr<grpc::ChannelCredentials> credentials = Credentials();
  if (calls_ == nullptr || calls_->credentials != credentials) {
    before = std::exchange(calls_,
                           std::make_shared<const CallConnection>(credentials, make_(credentials)));
  }
  return calls_;
}

std::shared_ptr<StreamCarrier> Connections::TakeCarrier() {
  std::vector<std::shared_ptr<StreamCarrier>> before;  // end after the mutex is free
  const MutexLock lock(mutex_);
  const std::shared_ptr<grpc::ChannelCredentials> credentials = Credentials();
  // Carriers of older credentials stay here while they carry a stream: the stream's last reference
  // to one may be dropped in a process that was forked, which must not end a connection.
  const auto idle = std::stable_partition(carriers_.begin(), carriers_.end(), [&](const auto& one) {
    return one->credentials == credentials || one->streams > 0;
  });
  before.assign(std::make_move_iterator(idle), std::make_move_iterator(carriers_.end()));
  carriers_.erase(idle, carriers_.end());
  auto carrier = std::find_if(carriers_.begin(), carriers_.end(), [&](const auto& one) {
    return one->credentials == credentials && one->streams < kStreamsAConnection;
  });
  if (carrier == carriers_.end()) {
    carrier = carriers_.insert(carriers_.end(), std::make_shared<StreamCarrier>());
    (*carrier)->credentials = credentials;
    (*carrier)->channel = make_(credentials);
  }
  ++(*carrier)->streams;
  return *carrier;
}

}  // namespace mla::client
