#include "server/server.h"

#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "base/version/version.h"
#include "proto/wire/thread_team.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "server/attend/attention_service.h"
#include "server/backend_choice.h"
#include "server/connections/bounded_service.h"
#include "server/connections/listeners.h"
#include "server/control/admin_service.h"
#include "server/control/cache_service.h"
#include "server/control/model_service.h"
#include "server/control/sequence_service.h"
#include "server/hand_over/grpc_peer.h"
#include "server/lifecycle/health_service.h"
#include "server/lifecycle/idle_calls.h"
#include "server/lifecycle/server_state.h"
#include "server/lifecycle/watchdog.h"
#include "server/logging/logging.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"
#include "server/metrics/open_metrics.h"
#include "server/operations/ops_http.h"
#include "server/operations/probes.h"
#include "server/operations/status_page.h"
#include "server/operations/status_source.h"
#include "server/pages/checkpoint_store.h"
#include "server/preflight.h"
#include "server/process/exit_guards.h"
#include "server/process/socket_files.h"
#include "server/reload/live_settings.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "server/tracing/exporters.h"
#include "server/tracing/tracer.h"
#include "server/ucx/transport_service.h"
#include "server/warm_up.h"
#include "server/wire_threads.h"

namespace mla::server {
namespace {

constexpr auto kProbePeriod = std::chrono::milliseconds(200);
// After a drain, calls that are under way have this long before they are cancelled.
constexpr auto kCloseGrace = std::chrono::milliseconds(200);

// Warns if wire.quota_bytes is too small. Queries read in place lie in gRPC's memory until they are
// computed, and staging memory bounds how many there are.
void WarnOfSmallQuota(const Config::Wire& wire, const kernels::BackendInfo& backend) {
  if (!backend.reads_fragments || wire.quota_bytes / 2 >= wire.staging_bytes) return;
  Log(LogLevel::kWarning, "quota_small",
      {{"wire.quota_bytes", wire.quota_bytes},
       {"at_least", absl::StrCat("2 * wire.staging_bytes, ", wire.staging_bytes)}});
}

TransportOptions TransportOptionsOf(const ServerOptions& options) {
  return {options.config.ucx, options.relay_program, options.config.shm.ring_entries,
          options.config.backend_options.gpu_runtime_library};
}

}  // namespace

// Members are constructed in this order and destroyed in the opposite one.
struct Server::Parts {
  ServerOptions options;
  uint64_t boot_id = RandomNumber();
  scheduler::RealClock clock;
  ServerState state;
  LiveSettings live;
  Metrics metrics;
  std::unique_ptr<Tracer> tracer = std::make_unique<Tracer>();
  std::vector<kernels::BackendCandidate> candidates;
  int64_t counted_bytes = 0;
  std::unique_ptr<scheduler::Engine> engine;
  std::shared_ptr<AttendMessagePool> pool;
  std::string shm_path;  // empty: no shared memory
  std::unique_ptr<SharedRegionTable> regions;
  std::unique_ptr<wire::ThreadTeam> team;
  std::optional<Drain> drain;
  std::unique_ptr<AttentionService> attention;
  std::unique_ptr<SequenceService> sequences;
  std::unique_ptr<CheckpointStore> checkpoints;  // null: no checkpoints
  AbandonedImports abandoned;
  PrefixTurns turns{PrefixTurns::Defaults()};
  std::unique_ptr<IdleCalls> idle;
  std::optional<Watchers> watchers;
  std::unique_ptr<ModelService> models;
  std::unique_ptr<CacheService> cache;
  std::unique_ptr<TransportService> transports;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<HealthService> health;
  // gRPC's interface to the five services above
  std::vector<std::unique_ptr<BoundedService>> control;
  std::unique_ptr<Watchdog> watchdog;
  std::shared_ptr<TlsFiles> tls;  // null: no TLS
  std::unique_ptr<StatusSource> status;
  std::optional<Probes> probes;
  std::unique_ptr<OpsHttp> ops;
  Listeners listeners;
  std::unique_ptr<SharedMemoryListener> listener;
  bool shut_down = false;

  absl::Status OpenCheckpoints();
  absl::Status MakeTracer();
  absl::Status MakeEngine();
  void MakeRegions();
  void MakeServices();
  void MakeHealth();
  absl::Status StartOps();
  absl::Status OpenListener();
  Services ServicesToServe();
  void Apply(const Config& config);
  DrainResult Shutdown(std::chrono::milliseconds drain_deadline);
};

absl::Status Server::Parts::OpenCheckpoints() {
  const Config::Checkpoint& config = options.config.checkpoint;
  if (config.path.empty()) return absl::OkStatus();
  const int64_t tenant = config.tenant_bytes > 0 ? config.tenant_bytes : config.bytes / 8 * 7;
  MLA_ASSIGN_OR_RETURN(
      checkpoints, CheckpointStore::Open({.path = config.path,
                                          .bytes = config.bytes,
                                          .tenant_bytes = tenant,
                                          .tenant_files = config.tenant_files,
                                          .chunk_bytes = options.config.wire.weight_chunk_bytes,
                                          .sequence_rows = options.config.limits.max_sequence_rows,
                                          .counters = &metrics.checkpoints()}));
  return absl::OkStatus();
}

absl::Status Server::Parts::MakeTracer() {
  const Config::Tracing& config = options.config.tracing;
  const TraceResource resource = {"mla-server", base::FullVersion(), absl::StrCat(boot_id)};
  std::vector<std::unique_ptr<SpanExporter>> exporters;
  if (!config.otlp_target.empty()) {
    exporters.push_back(MakeOtlpExporter(config.otlp_target, resource));
  }
  if (!config.file.empty()) {
    MLA_ASSIGN_OR_RETURN(auto file, MakeJsonExporter(config.file, config.file_bytes, resource));
    exporters.push_back(std::move(file));
  }
  tracer = std::make_unique<Tracer>(TracerOptions{config.sample_every, config.traces_per_s,
                                                  config.tenant_traces_per_s, config.queue_spans},
                                    std::move(exporters));
  tracer->set_observer([this](const TracedMessage& message) {
    metrics.ShowTrace(message.kind, message.total_ns, message.queue_ns, TraceIdText(message.trace));
  });
  return absl::OkStatus();
}

absl::Status Server::Parts::MakeEngine() {
  Config& config = options.config;
  std::unique_ptr<kernels::AttentionBackend> chosen = std::move(options.backend);
  if (chosen == nullptr) {
    MLA_ASSIGN_OR_RETURN(auto choice, ChooseBackend(config, options.registry));
    candidates = std::move(choice.candidates);
    chosen = std::move(choice.backend);
  }
  LogSelection(candidates);
  const kernels::AttentionBackend& backend = *chosen;
  ChooseSizes(backend, &config);
  const scheduler::EngineBytes bytes = scheduler::Engine::CountBytes(config.limits, backend);
  counted_bytes = bytes.sum();
  Log(LogLevel::kInfo, "memory",
      {{"kv_cache_bytes", config.limits.kv_cache_bytes},
       {"weights_bytes", config.limits.weights_bytes},
       {"host_bytes", bytes.host},
       {"device_bytes", bytes.device}});
  MLA_RETURN_IF_ERROR(CheckHostMemory(config, backend));
  scheduler::EngineOptions engine_options;
  engine_options.limits = config.limits;
  engine_options.tenants = TenantOptionsOf(config);
  engine_options.observer = &metrics;
  MLA_RETURN_IF_ERROR(OpenCheckpoints());
  engine_options.tier_path = config.tiers.file_path;
  engine_options.tier_threads = config.tiers.threads;
  if (checkpoints != nullptr) engine_options.prefix_secret = checkpoints->prefix_secret();
  MLA_ASSIGN_OR_RETURN(engine,
                       scheduler::Engine::Create(engine_options, std::move(chosen), &clock));
  metrics.SetTenants(engine->tenants(), config.tenants.metrics);
  metrics.SetBackend(engine->backend_info(), config.limits.kv_cache_bytes, counted_bytes);
  metrics.SetCandidates(candidates);
  WarnOfSmallQuota(config.wire, engine->backend_info());
  LogBackend(engine->backend_info());
  MLA_ASSIGN_OR_RETURN(auto staging,
                       engine->AllocateHost(static_cast<size_t>(config.wire.staging_bytes)));
  pool = std::make_shared<AttendMessagePool>(std::move(staging), engine->tenants());
  return absl::OkStatus();
}

void Server::Parts::MakeServices() {
  const RpcContext rpc = {engine.get(),
                          &metrics,
                          boot_id,
                          &live,
                          ControlReserve(options.config),
                          options.config.listen.unix_tenant,
                          &abandoned,
                          &turns,
                          tracer.get()};
  drain.emplace(engine.get(), &state);
  WireContext wire;
  wire.unix_tenant = options.config.listen.unix_tenant;
  wire.engine = engine.get();
  wire.pool = pool;
  wire.wire = options.config.wire;
  wire.metrics = &metrics;
  team = std::make_unique<wire::ThreadTeam>(TeamOf(options.config.wire, engine->backend_info()));
  wire.team = team.get();
  wire.regions = regions.get();
  wire.boot_id = boot_id;
  wire.tracer = tracer.get();
  attention = std::make_unique<AttentionService>(wire);
  sequences = std::make_unique<SequenceService>(rpc);
  const int64_t chunk_bytes = options.config.wire.weight_chunk_bytes;
  idle = std::make_unique<IdleCalls>(std::chrono::milliseconds(options.config.wire.upload_idle_ms));
  models = std::make_unique<ModelService>(rpc, chunk_bytes, idle.get());
  watchers.emplace(&state, options.config.wire.max_watchers);
  cache =
      std::make_unique<CacheService>(rpc, chunk_bytes, idle.get(), checkpoints.get(), &*watchers);
  transports = std::make_unique<TransportService>(rpc, TransportOptionsOf(options), &state);
  AdminOptions admin_options;
  admin_options.ucx = transports->usable();
  admin_options.watchers = &*watchers;
  admin_options.drain = &*drain;
  if (tls != nullptr) {
    admin_options.connect_peers = [this](const std::vector<std::string>& addresses) {
      return HandOver::Connect({engine.get(), &metrics.hand_overs(), boot_id},
                               GrpcTargets(*tls, addresses, options.config.hand_over_streams));
    };
  }
  admin_options.exit = [this] {
    if (options.on_exit_request) options.on_exit_request();
  };
  admin_options.candidates = candidates;
  admin_options.config = options.config;
  admin_options.shared_memory = regions != nullptr;
  admin_options.checkpoints = checkpoints != nullptr;
  admin_options.stats = [this] { return watchdog->Stats(); };
  admin = std::make_unique<AdminService>(rpc, std::move(admin_options));
  const auto serve = [&](grpc::Service* service, const std::string& name) {
    const auto* contract =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    control.push_back(std::make_unique<BoundedService>(
        service, *contract,
        [rpc](const grpc::ServerContextBase& caller, int64_t bytes) {
          return rpc.AdmitRequest(caller, bytes);
        },
        [rpc](const grpc::ServerContextBase& caller) { return rpc.BeginTurn(caller); }));
  };
  serve(sequences.get(), v1::Sequences::service_full_name());
  serve(models.get(), v1::Models::service_full_name());
  serve(cache.get(), v1::Cache::service_full_name());
  serve(transports.get(), v1::Transports::service_full_name());
  serve(admin.get(), v1::Admin::service_full_name());
  MakeHealth();
}

void Server::Parts::MakeHealth() {
  HealthOptions health_options;
  health_options.services = {
      v1::Attention::service_full_name(),  v1::Sequences::service_full_name(),
      v1::Models::service_full_name(),     v1::Cache::service_full_name(),
      v1::Transports::service_full_name(), v1::Admin::service_full_name()};
  health_options.max_watchers = options.config.wire.max_health_calls;
  health_options.max_name_bytes = static_cast<size_t>(options.config.limits.max_name_bytes);
  health_options.unix_tenant = options.config.listen.unix_tenant;
  health = std::make_unique<HealthService>(&state, std::move(health_options));
}

Services Server::Parts::ServicesToServe() {
  Services services;
  services.attention = attention.get();
  services.health = health.get();
  for (const auto& service : control) services.control.push_back(service.get());
  services.tls = tls;
  services.on_connection_refused = [this] { metrics.wire().connections_refused.fetch_add(1); };
  services.on_undecodable = [this](const grpc::ServerContextBase& context) {
    const auto names = static_cast<size_t>(options.config.limits.max_name_bytes);
    const auto identity = Identify(context, names, options.config.listen.unix_tenant);
    metrics.ForTenant(identity.ok() ? identity->tenant : "unknown")
        ->Count(absl::StatusCode::kInvalidArgument);
  };
  return services;
}

void Server::Parts::Apply(const Config& config) {
  Config in_use = options.config;  // the sizes that were chosen at the start, too
  in_use.tenants = config.tenants;
  engine->tenants()->Reconfigure(TenantOptionsOf(in_use));
  live.Set(config);
  engine->SetDefaultLeases(live.leases());
  watchdog->SetTimeout(std::chrono::milliseconds(config.unhealthy_after_ms));
}

absl::Status Server::Parts::StartOps() {
  probes.emplace(&state, &live, tls.get(), UnusedGpus(candidates));
  const Config::Ops& config = options.config.ops;
  if (config.address.empty()) return absl::OkStatus();
  StatusSourceOptions source;
  source.state = &state;
  source.metrics = &metrics;
  source.engine = engine.get();
  source.config = &options.config;
  source.staging = &pool->staging();
  source.tls = tls.get();
  source.candidates = candidates;
  source.boot_id = boot_id;
  source.stats = [this] { return watchdog->Stats(); };
  status = std::make_unique<StatusSource>(std::move(source));
  std::map<std::string, HttpHandler> paths;
  paths["/metrics"] = [this](const HttpRequest& request) {
    status->Note();
    metrics.SetServing(state.Get().serving());
    if (tls != nullptr) {
      const std::shared_ptr<const TlsMaterial> files = tls->current();
      metrics.SetTls(tls->status(), {{"cert", files->cert_expires},
                                     {"client_ca", files->client_ca_expires},
                                     {"client_crl", files->client_crl_expires}});
    }
    metrics.SetTraces(tracer->stats());
    const bool open = WantsOpenMetrics(request.accept);
    return HttpReply{200, open ? kOpenMetricsType : "text/plain; version=0.0.4; charset=utf-8",
                     metrics.Expose(watchdog->Stats(), open)};
  };
  paths["/livez"] = [this](const HttpRequest&) { return probes->Alive(); };
  paths["/readyz"] = [this](const HttpRequest& request) {
    status->Note();
    return probes->Ready(request.query);
  };
  paths["/statusz"] = [this](const HttpRequest& request) {
    if (request.query == "json")
      return HttpReply{200, "application/json", StatusJson(status->Page())};
    return HttpReply{200, "text/html; charset=utf-8", StatusHtml(status->Page())};
  };
  MLA_ASSIGN_OR_RETURN(ops, OpsHttp::Start(config.address, config.connections, std::move(paths)));
  return absl::OkStatus();
}

// Sets up the table of regions. The listener opens once there is something to serve.
void Server::Parts::MakeRegions() {
  if (shm_path.empty()) return;
  const Config::Shm& shm = options.config.shm;
  RegionHooks hooks;
  hooks.on_mapped = [this](std::span<std::byte> memory) {
    absl::Status status = engine->RegisterHost(memory);
    if (!status.ok()) {
      Log(LogLevel::kWarning, "region_not_pinned",
          {{"bytes", memory.size()}, {"reason", std::string(status.message())}});
    }
    return status;
  };
  hooks.before_unmapped = [this](std::span<std::byte> memory) { engine->UnregisterHost(memory); };
  hooks.make_device = [this](int64_t bytes, int32_t events) {
    return engine->AllocateShared(bytes, events);
  };
  const RegionLimits limits = {shm.region_bytes, shm.total_bytes, shm.regions_max,
                               shm.tenant_regions, shm.device_bytes};
  regions = std::make_unique<SharedRegionTable>(limits, std::move(hooks), engine->tenants());
}

absl::Status Server::Parts::OpenListener() {
  if (regions == nullptr) return absl::OkStatus();
  SharedMemoryListenerOptions listener_options;
  listener_options.engine = engine.get();
  listener_options.regions = regions.get();
  listener_options.metrics = &metrics;
  listener_options.pool = pool;
  listener_options.team = team.get();
  listener_options.boot_id = boot_id;
  listener_options.tracer = tracer.get();
  listener_options.path = shm_path;
  listener_options.shm = options.config.shm;
  listener_options.any_user = !options.config.listen.socket_group.empty();
  listener_options.unix_tenant = options.config.listen.unix_tenant;
  listener_options.open_folder = options.config.listen.open_folder;
  listener_options.max_name_bytes = static_cast<size_t>(options.config.limits.max_name_bytes);
  MLA_ASSIGN_OR_RETURN(listener, SharedMemoryListener::Open(std::move(listener_options)));
  transports->Offer(listener.get());
  if (options.config.listen.socket_group.empty()) return absl::OkStatus();
  return GiveToGroup(shm_path, options.config.listen.socket_group);
}

DrainResult Server::Parts::Shutdown(std::chrono::milliseconds drain_deadline) {
  DrainResult result;
  if (std::exchange(shut_down, true)) return result;
  if (drain) result = drain->Run(drain_deadline, /*for_good=*/true);
  state.Move(Phase::kStopped, 100, "stopped");
  if (transports != nullptr) transports->Withdraw();
  listener.reset();
  listeners.acceptor.reset();
  if (listeners.server != nullptr) {
    listeners.server->Shutdown(std::chrono::system_clock::now() + kCloseGrace);
    listeners.server->Wait();
  }
  if (attention != nullptr) attention->Stop();
  if (health != nullptr) health->Stop();
  if (listeners.poller != nullptr) listeners.poller->Stop();
  listeners.server.reset();
  ops.reset();
  watchdog.reset();
  return result;
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  auto parts = std::make_unique<Parts>();
  parts->options = std::move(options);
  const Config& config = parts->options.config;
  parts->live.Set(config);
  parts->shm_path = ShmSocketPath(config.shm, ServedUnixPath(config));
  if (!config.tls.cert.empty()) {
    MLA_ASSIGN_OR_RETURN(parts->tls, TlsFiles::Open(config.tls));
  }
  MLA_RETURN_IF_ERROR(parts->MakeTracer());
  MLA_RETURN_IF_ERROR(parts->MakeEngine());
  parts->MakeRegions();
  parts->MakeServices();
  scheduler::Engine* const engine = parts->engine.get();
  parts->watchdog = std::make_unique<Watchdog>(
      [engine] {
        return Heartbeat{engine->Healthy(), engine->Stats()};
      },
      &parts->state, std::chrono::milliseconds(config.unhealthy_after_ms), kProbePeriod,
      StuckCalls{[engine] { return engine->StuckCall(); }, EndStuck});
  MLA_RETURN_IF_ERROR(parts->StartOps());
  MLA_ASSIGN_OR_RETURN(
      auto listeners,
      Listen(config, PollingOf(config.wire, engine->backend_info()), parts->ServicesToServe()));
  parts->listeners = std::move(listeners);
  // If something fails from here on, the server must be shut down in order, because clients may
  // already have streams.
  std::unique_ptr<Server> server(new Server(std::move(parts)));
  Parts& started = *server->parts_;
  MLA_RETURN_IF_ERROR(started.OpenListener());
  Log(LogLevel::kInfo, "listening",
      {{"tcp_port", started.listeners.tcp_port},
       {"unix_path", started.listeners.unix_path},
       {"shm_path", started.shm_path},
       {"ops_port", started.ops == nullptr ? 0 : started.ops->port()},
       {"tls", config.tls.cert.empty() ? "no" : "mutual"},
       {"reflection", started.listeners.introspection ? "on" : "off"}});
  server->parts_->state.Move(Phase::kWarming, 0, "known-answer test");
  MLA_RETURN_IF_ERROR(WarmUp(engine));
  server->parts_->state.Move(Phase::kServing, 100, "");
  return server;
}

Server::Server(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Server::~Server() { parts_->Shutdown(std::chrono::milliseconds(0)); }

int Server::tcp_port() const { return parts_->listeners.tcp_port; }
int Server::ops_port() const { return parts_->ops == nullptr ? 0 : parts_->ops->port(); }
uint64_t Server::boot_id() const { return parts_->boot_id; }

bool Server::Alive() const { return parts_->probes->Alive().status == HttpReply().status; }

void Server::Apply(const Config& config) { parts_->Apply(config); }

void Server::NoteConfig(const ReloadStats& status) {
  parts_->metrics.SetConfig(status);
  parts_->live.SetRefusal(status.why);
}

void Server::LookAtTls() {
  if (parts_->tls != nullptr) parts_->tls->LookSoon();
}

DrainResult Server::Shutdown(std::chrono::milliseconds drain_deadline) {
  return parts_->Shutdown(drain_deadline);
}

}  // namespace mla::server
