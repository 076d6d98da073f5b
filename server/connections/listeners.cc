#include "server/connections/listeners.h"

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <climits>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/wire/grpc_tuning.h"
#include "server/connections/credentials.h"
#include "server/logging/logging.h"
#include "server/process/process_usage.h"
#include "server/process/socket_files.h"

namespace mla::server {
namespace {

// A session that waits for nothing does not poll. Then only gRPC's background poller answers
// probes, about every five seconds.
constexpr int kPingAnswerMs = 10000;

// Threads in addition to the control calls' threads: a few for gRPC's own work, the rest for calls
// that will be refused. A call holds a thread before the server sees it, and gRPC itself refuses
// every call of any tenant while all threads are busy. So there must be threads for a burst.
constexpr int kOtherThreads = 192;

// Plugins are registered for the whole process; this option enables or disables them for one
// server.
class Introspection final : public grpc::ServerBuilderOption {
 public:
  explicit Introspection(bool wanted) : wanted_(wanted) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    if (wanted_) return;
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) {
                                    return plugin->name() == "proto_server_reflection" ||
                                           plugin->name() == "channelz_service";
                                  }),
                   plugins->end());
  }

 private:
  const bool wanted_;
};

void RegisterPluginsOnce() {
  static const bool once = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::channelz::experimental::InitChannelzService();
    return true;
  }();
  static_cast<void>(once);
}

bool WantsIntrospection(const Config& config) {
  if (config.listen.reflection != "auto") return config.listen.reflection == "on";
  return config.listen.address.empty() || IsLoopback(config.listen.address);
}

int MillisOrUnlimited(int64_t ms) {
  return ms == 0 ? INT_MAX : static_cast<int>(std::min<int64_t>(ms, INT_MAX));
}

void SetLimits(const Config::Wire& wire, grpc::ServerBuilder* builder) {
  // One bound for all services; the Attend stream applies wire.message_bytes itself.
  const int64_t received = std::max(wire.message_bytes, wire.weight_chunk_bytes + 4096);
  builder->SetMaxReceiveMessageSize(static_cast<int>(received));
  builder->SetMaxSendMessageSize(static_cast<int>(wire.message_bytes));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, wire.connection_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(wire.metadata_bytes));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                              MillisOrUnlimited(wire.connection_age_ms));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                              MillisOrUnlimited(wire.connection_idle_ms));
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              MillisOrUnlimited(wire.handshake_ms));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, MillisOrUnlimited(wire.keepalive_ms));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                              std::max(MillisOrUnlimited(wire.keepalive_ms), kPingAnswerMs));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 1);
  // Nothing is decompressed, because a message can grow a thousandfold before its size can be
  // checked. gRPC refuses calls with an encoding that is switched off with UNIMPLEMENTED.
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder->AddChannelArgument(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                              1 << GRPC_COMPRESS_NONE);
  grpc::ResourceQuota quota("mla-server");
  quota.Resize(static_cast<size_t>(wire.quota_bytes));
  quota.SetMaxThreads(wire.control_threads + kOtherThreads);
  builder->SetResourceQuota(quota);
  builder->SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 4);
}

ConnectionBounds BoundsOf(const Config::Wire& wire, const Services& services) {
  ConnectionBounds bounds;
  bounds.max_connections = wire.max_connections;
  bounds.peer_connections = wire.peer_connections;
  bounds.unacknowledged_ms = std::max<int64_t>(wire.keepalive_ms, kPingAnswerMs);
  bounds.on_refused = services.on_connection_refused;
  const int64_t descriptors = DescriptorsForConnections();
  if (descriptors < wire.max_connections) {
    // One peer must not be able to take all connections.
    bounds.max_connections = static_cast<int32_t>(descriptors);
    bounds.peer_connections =
        std::min(bounds.peer_connections, std::max(bounds.max_connections / 2, 1));
    Log(LogLevel::kWarning, "few_descriptors",
        {{"wire.max_connections", wire.max_connections},
         {"possible", bounds.max_connections},
         {"of_one_peer", bounds.peer_connections}});
  }
  return bounds;
}

}  // namespace

std::string ServedUnixPath(const Config& config) {
  return UnixPath(config.listen, RuntimeFolder());
}

absl::StatusOr<Listeners> Listen(const Config& config, const CompletionPollerOptions& polling,
                                 const Services& services) {
  RegisterPluginsOnce();
  Listeners listeners;
  listeners.introspection = WantsIntrospection(config);
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (services.tls != nullptr) credentials = MutualTls(services.tls);
  grpc::ServerBuilder builder;
  SetLimits(config.wire, &builder);
  builder.SetOption(std::make_unique<Introspection>(listeners.introspection));
  using ServerBuilder = grpc::ServerBuilder::experimental_type;
  const auto from_descriptors = ServerBuilder::ExternalConnectionType::FROM_FD;
  auto acceptor = std::make_unique<ConnectionAcceptor>(BoundsOf(config.wire, services));
  if (!config.listen.address.empty()) {
    MLA_ASSIGN_OR_RETURN(listeners.tcp_port,
                         acceptor->ListenTcp(config.listen.address,
                                             builder.experimental().AddExternalConnectionAcceptor(
                                                 from_descriptors, credentials)));
  }
  listeners.unix_path = ServedUnixPath(config);
  const std::string& unix_path = listeners.unix_path;
  if (!unix_path.empty()) {
    MLA_RETURN_IF_ERROR(
        PrepareSocketFolder("server.unix_path", unix_path, config.listen.open_folder));
    if (IsServed(unix_path, SOCK_STREAM)) {
      return absl::UnavailableError(absl::StrCat("unix:", unix_path, ": another server is there"));
    }
    // The socket file is group and owner only, from its first moment. With TLS it is for the owner
    // only, because a caller without a certificate must not be able to name any tenant.
    const bool owner_only = services.tls != nullptr && config.listen.unix_tenant.empty();
    const mode_t before = umask(S_IRWXO | S_IXUSR | S_IXGRP | (owner_only ? S_IRWXG : 0));
    const absl::Status bound =
        acceptor->ListenUnix(unix_path, builder.experimental().AddExternalConnectionAcceptor(
                                            from_descriptors, grpc::InsecureServerCredentials()));
    umask(before);
    if (!bound.ok()) return bound;
  }
  builder.RegisterService(services.attention);
  builder.RegisterService(services.health);
  for (grpc::Service* service : services.control) builder.RegisterService(service);
  builder.experimental().SetInterceptorCreators(InterceptUndecodable(services.on_undecodable));
  listeners.poller = std::make_unique<CompletionPoller>(&builder, polling);
  listeners.server = builder.BuildAndStart();
  if (listeners.server == nullptr) return absl::UnavailableError("gRPC does not start");
  if (!unix_path.empty() && !config.listen.socket_group.empty()) {
    MLA_RETURN_IF_ERROR(GiveToGroup(unix_path, config.listen.socket_group));
  }
  services.attention->Serve(listeners.poller.get());
  services.health->Serve(listeners.poller.get());
  listeners.poller->Start();
  MLA_RETURN_IF_ERROR(acceptor->Start());
  listeners.acceptor = std::move(acceptor);
  return listeners;
}

}  // namespace mla::server
