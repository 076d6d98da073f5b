#include "client/cpp/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "proto/wire/grpc_tuning.h"

namespace mla::client {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(path + ": cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(
    const ClientOptions& options) {
  if (options.tls_ca.empty() && options.tls_cert.empty() && options.tls_key.empty()) {
    return grpc::InsecureChannelCredentials();
  }
  grpc::SslCredentialsOptions ssl;
  for (const auto& [path, text] : {std::pair(&options.tls_ca, &ssl.pem_root_certs),
                                   std::pair(&options.tls_cert, &ssl.pem_cert_chain),
                                   std::pair(&options.tls_key, &ssl.pem_private_key)}) {
    auto read = ReadFile(*path);
    if (!read.ok()) return read.status();
    *text = *std::move(read);
  }
  return grpc::SslCredentials(ssl);
}

grpc::ChannelArguments Arguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  // Sizes are the server's to bound: it answers with the limit that was exceeded.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  // A client that shared another's connection would share its fate and its flow control.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  return arguments;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& target,
                                                           const ClientOptions& options) {
  auto credentials = Credentials(options);
  if (!credentials.ok()) return credentials.status();
  return grpc::CreateCustomChannel(target, *credentials, Arguments(options));
}

std::string UnixPathOf(const std::string& target) {
  constexpr absl::string_view kScheme = "unix:";
  if (!absl::StartsWith(target, kScheme)) return "";
  absl::string_view path(target);
  path.remove_prefix(kScheme.size());
  if (absl::StartsWith(path, "//")) path.remove_prefix(2);
  return std::string(path);
}

std::string ShmPathOf(const std::string& target) {
  const std::string path = UnixPathOf(target);
  return path.empty() ? "" : path + ".shm";
}

}  // namespace mla::client
