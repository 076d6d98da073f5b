#include "client/cpp/channel.h"

#include <arpa/inet.h>
#include <grpc/compression.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <netinet/in.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/wire/grpc_tuning.h"

namespace mla::client {
namespace {

// A server's largest message (wire.message_bytes) is at most this.
constexpr int kMostReplyBytes = 1 << 30;
// A connection that is silent for this time is probed, and is given up if no answer comes in time:
// a firewall may have forgotten it. Servers take a probe every 5 s.
constexpr int kKeepaliveMs = 20000;
constexpr int kKeepaliveAnswerMs = 10000;
// The same bound for another host. gRPC has the kernel give a connection up, too, whose packets are
// not acknowledged for this time. The kernel sends them again after pauses that double, so a client
// would wait for as long as an outage lasted: after 2.5 s a new connection, which the kernel tries
// every second, is sooner back. Probes only go out during calls: gRPC reads the answer to another
// one up to 5 s later.
constexpr int kRemoteAnswerMs = 2500;
constexpr absl::string_view kUnixScheme = "unix:";

// Returns the path in the form of a URI's part, because gRPC parses targets as URIs.
std::string EscapedPath(absl::string_view path) {
  constexpr absl::string_view kPlain = "/-._~";
  std::string escaped;
  for (const char c : path) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains(kPlain, c)) {
      escaped += c;
    } else {
      absl::StrAppendFormat(&escaped, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return escaped;
}

bool IsLoopback(absl::string_view address) {
  absl::string_view host = address;
  if (absl::ConsumePrefix(&host, "[")) {
    host = host.substr(0, host.find(']'));
  } else if (const size_t colon = host.find(':'); colon == host.rfind(':')) {
    host = host.substr(0, colon);  // without brackets an IPv6 address cannot have a port
  }
  const std::string name = absl::AsciiStrToLower(host.substr(0, host.find('%')));
  if (name == "localhost" || absl::EndsWith(name, ".localhost")) return true;
  in_addr v4;
  if (inet_pton(AF_INET, name.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, name.c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

}  // namespace

grpc::ChannelArguments ChannelArgumentsOf(const std::string& target, const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMostReplyBytes);
  // The client sets no limit, because the server bounds requests and says in its answer which limit
  // was exceeded.
  arguments.SetMaxSendMessageSize(-1);
  // Nothing is decompressed, because a message can grow a thousandfold before its size can be
  // checked.
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  const bool local = IsLocalTarget(target);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, local ? kKeepaliveAnswerMs : kRemoteAnswerMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, local ? 1 : 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kLeastBackoffMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLongestBackoffMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);  // bounds an attempt
  // Clients must not share a connection, or the failure and the flow control of one would affect
  // the others.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // By default gRPC uses http_proxy even for this host, and its no_proxy cannot name networks.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, options.http_proxy && !local ? 1 : 0);
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  return arguments;
}

absl::StatusOr<ChannelMaker> ChannelMakerOf(const std::string& target,
                                            const ClientOptions& options) {
  std::string address = target;
  if (const std::string path = UnixPathOf(target); !path.empty()) {
    if (absl::StrContains(path, ',')) {
      return absl::InvalidArgumentError(
          absl::StrCat("target: got \"", target,
                       "\", must be a path without a comma: gRPC takes it for two paths"));
    }
    address = absl::StrCat(kUnixScheme, EscapedPath(path));
  }
  return [address, arguments = ChannelArgumentsOf(target, options)](
             std::shared_ptr<grpc::ChannelCredentials> credentials) {
    return grpc::CreateCustomChannel(address, std::move(credentials), arguments);
  };
}

bool IsLocalTarget(const std::string& target) {
  if (absl::StartsWith(target, kUnixScheme) || absl::StartsWith(target, "unix-abstract:")) {
    return true;
  }
  absl::string_view addresses = target;
  for (const absl::string_view resolver : {"dns:", "ipv4:", "ipv6:"}) {
    if (!absl::ConsumePrefix(&addresses, resolver)) continue;
    // The name of a DNS server may stand before the address.
    if (absl::ConsumePrefix(&addresses, "//")) {
      addresses.remove_prefix(std::min(addresses.find('/'), addresses.size() - 1) + 1);
    }
    break;
  }
  for (const absl::string_view address : absl::StrSplit(addresses, ',')) {
    if (!IsLoopback(address)) return false;
  }
  return true;
}

std::string UnixPathOf(const std::string& target) {
  absl::string_view path(target);
  if (!absl::ConsumePrefix(&path, kUnixScheme)) return "";
  absl::ConsumePrefix(&path, "//");
  return std::string(path);
}

std::string ShmPathOf(const std::string& target) {
  const std::string path = UnixPathOf(target);
  return path.empty() ? "" : path + ".shm";
}

}  // namespace mla::client
