#include "server/control/admin_service.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/version/version.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/request_validator.h"
#include "server/hand_over/take_over.h"
#include "server/logging/logging.h"
#include "server/metrics/stats_table.h"

namespace mla::server {
namespace {

// A watcher checks at this interval if its client is still there.
constexpr auto kCancelPeriod = std::chrono::milliseconds(100);

// Tokens of optional features; clients check them instead of version numbers.
constexpr const char* kCapabilities[] = {"fork",
                                         "truncate",
                                         "participants",
                                         "partial_commit",
                                         "lse",
                                         "kv_compare",
                                         "quotas",
                                         "eviction",
                                         "cancel_drain",
                                         "model_leases",
                                         "prefix_cache",
                                         "fp8_wire",
                                         "page_groups",
                                         "cache_events",
                                         "cache_hints",
                                         "hand_over",
                                         "probe",
                                         "pages_xxh3",
                                         "hand_over_weights",
                                         "all_sequences",
                                         "hand_over_many",
                                         "hand_over_weight_parts",
                                         "hand_over_sinks"};
constexpr const char* kSharedMemoryCapabilities[] = {"shared_memory", "command_ring"};

// Returns false for names without a port and for URIs, which gRPC would interpret differently.
bool IsHostAndPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  int32_t port = 0;
  if (colon == address.npos || !absl::ascii_isdigit(address.back()) ||
      !absl::ascii_isdigit(address[colon + 1]) ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return false;
  }
  absl::string_view host = address.substr(0, colon);
  const bool ipv6 = absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  return !host.empty() && std::all_of(host.begin(), host.end(), [ipv6](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_' || (ipv6 && c == ':');
  });
}

template <typename To, typename From>
To Unsigned(From value) {
  return static_cast<To>(std::max<From>(value, 0));
}

using scheduler::kUnbounded;
using scheduler::Resource;
using scheduler::ResourceRow;
using scheduler::TenantUsage;

// Both enumerations have the same numbers.
static_assert(static_cast<int>(Resource::kKvBytes) == v1::QUOTA_RESOURCE_KV_BYTES);
static_assert(static_cast<int>(Resource::kControlCalls) == v1::QUOTA_RESOURCE_CONTROL_CALLS);
static_assert(static_cast<int>(Resource::kPrefixTokens) == v1::QUOTA_RESOURCE_PREFIX_TOKENS);
static_assert(static_cast<int>(Resource::kControlBytes) == v1::QUOTA_RESOURCE_CONTROL_BYTES);
static_assert(static_cast<int>(Resource::kTailBytes) == v1::QUOTA_RESOURCE_TAIL_BYTES);
static_assert(scheduler::kResourceCount == v1::QuotaResource_ARRAYSIZE - 1);
static_assert(static_cast<int>(scheduler::BoundSource::kRuntime) == v1::QUOTA_SOURCE_RUNTIME);

constexpr size_t kMostBounds = 4 * scheduler::kResourceCount;

void Fill(const TenantUsage& from, v1::TenantQuota* quota) {
  quota->set_tenant(from.name);
  quota->set_weight(static_cast<uint32_t>(from.weight));
  for (const ResourceRow& row : scheduler::ResourceRows()) {
    v1::QuotaUsage* usage = quota->add_resources();
    usage->set_resource(static_cast<v1::QuotaResource>(row.resource));
    usage->set_name(row.name);
    usage->set_used(static_cast<uint64_t>(std::max<int64_t>(0, from.used[row.resource])));
    usage->set_bound(static_cast<uint64_t>(from.bound[row.resource]));
    usage->set_source(static_cast<v1::QuotaSource>(from.source[row.resource]));
    usage->set_refused(from.refused[row.resource]);
  }
}

void FillServer(const scheduler::TenantTable& tenants, v1::GetQuotaReply* reply) {
  for (const ResourceRow& row : scheduler::ResourceRows()) {
    v1::QuotaUsage* usage = reply->add_server();
    usage->set_resource(static_cast<v1::QuotaResource>(row.resource));
    usage->set_name(row.name);
    usage->set_used(static_cast<uint64_t>(std::max<int64_t>(0, tenants.server_used(row.resource))));
    usage->set_bound(static_cast<uint64_t>(tenants.server_bound(row.resource)));
    usage->set_source(v1::QUOTA_SOURCE_CONFIGURED);
  }
}

void LogOperator(const char* event, const Identity& who, const std::string& tenant,
                 const std::string& what) {
  Log(LogLevel::kInfo, event, {{"operator", who.tenant}, {"tenant", tenant}, {"what", what}});
}

absl::Status ParseQuota(const v1::SetQuotaRequest& request, scheduler::TenantQuota* quota) {
  if (request.bounds_size() > static_cast<int>(kMostBounds)) {
    return RefuseField("bounds", absl::StrCat(request.bounds_size()),
                       absl::StrCat("at most ", kMostBounds, " entries"));
  }
  for (int i = 0; i < request.bounds_size(); ++i) {
    const v1::QuotaBound& bound = request.bounds(i);
    const std::string path = absl::StrCat("bounds[", i, "].");
    const int resource = bound.resource();
    if (resource < 1 || resource > static_cast<int>(scheduler::kResourceCount)) {
      return RefuseField(path + "resource", absl::StrCat(resource),
                         absl::StrCat("1..", scheduler::kResourceCount), "unknown_value");
    }
    if (bound.bound() > static_cast<uint64_t>(kUnbounded)) {
      return RefuseField(path + "bound", absl::StrCat(bound.bound()),
                         absl::StrCat("0..", kUnbounded));
    }
    auto& slot = quota->bounds[static_cast<Resource>(resource)];
    if (slot) {
      return RefuseField(path + "resource", absl::StrCat(resource, " again"),
                         "each resource at most once", "repeated");
    }
    slot = static_cast<int64_t>(bound.bound());
  }
  if (request.weight() > static_cast<uint32_t>(scheduler::kMaxTenantWeight)) {
    return RefuseField("weight", absl::StrCat(request.weight()),
                       absl::StrCat("0..", scheduler::kMaxTenantWeight));
  }
  if (request.weight() > 0) quota->weight = static_cast<int32_t>(request.weight());
  return absl::OkStatus();
}

}  // namespace

AdminService::AdminService(const RpcContext& rpc, AdminOptions options)
    : rpc_(rpc), options_(std::move(options)), started_(std::chrono::steady_clock::now()) {}

scheduler::EngineStats AdminService::Stats() const {
  return options_.stats ? options_.stats() : rpc_.engine->Stats();
}

void AdminService::FillLimits(v1::Limits* limits) const {
  const scheduler::Limits& from = rpc_.engine->limits();
  limits->set_message_bytes(static_cast<uint64_t>(options_.config.wire.message_bytes));
  limits->set_inflight_bytes(static_cast<uint64_t>(options_.config.wire.inflight_bytes));
  limits->set_max_sequences(static_cast<uint32_t>(from.max_sequences));
  limits->set_max_step_rows(static_cast<uint32_t>(from.max_step_rows));
  limits->set_max_step_sequences(static_cast<uint32_t>(from.max_step_sequences));
  limits->set_max_open_steps(static_cast<uint32_t>(from.max_open_steps));
  limits->set_max_models(static_cast<uint32_t>(from.max_models));
  limits->set_max_heads(static_cast<uint32_t>(from.max_heads));
  limits->set_max_sequence_rows(static_cast<uint64_t>(from.max_sequence_rows));
  limits->set_queue_requests(static_cast<uint32_t>(from.queue_requests));
  limits->set_launch_rows(static_cast<uint32_t>(from.launch_rows));
  limits->set_prefill_rows(static_cast<uint32_t>(from.prefill_rows));
  limits->set_kv_cache_bytes(static_cast<uint64_t>(from.kv_cache_bytes));
  limits->set_weights_bytes(static_cast<uint64_t>(from.weights_bytes));
  limits->set_default_page_size(static_cast<uint32_t>(from.default_page_size));
  const scheduler::DefaultLeases leases = rpc_.live->leases();
  limits->set_sequence_lease_ms(static_cast<uint32_t>(leases.sequence_ms));
  limits->set_step_lease_ms(static_cast<uint32_t>(leases.step_ms));
  limits->set_kv_wait_ms(static_cast<uint32_t>(from.kv_wait_ms));
  limits->set_weight_chunk_bytes(static_cast<uint64_t>(options_.config.wire.weight_chunk_bytes));
  limits->set_max_participants(static_cast<uint32_t>(from.max_participants));
  limits->set_max_lease_ms(static_cast<uint32_t>(from.max_lease_ms));
  limits->set_max_name_bytes(static_cast<uint32_t>(from.max_name_bytes));
  limits->set_slice_wait_us(static_cast<uint32_t>(from.slice_wait_us));
  limits->set_max_layers(static_cast<uint32_t>(from.max_layers));
  limits->set_max_row_dim(static_cast<uint32_t>(from.max_row_dim));
  limits->set_max_v_dim(static_cast<uint32_t>(from.max_v_dim));
  limits->set_max_top_k(static_cast<uint32_t>(from.max_top_k));
  limits->set_max_hidden_size(static_cast<uint32_t>(from.max_hidden_size));
  limits->set_max_tail_bytes(static_cast<uint32_t>(from.max_tail_bytes));
  if (options_.shared_memory) {
    limits->set_shm_region_bytes(static_cast<uint64_t>(options_.config.shm.region_bytes));
    limits->set_shm_ring_entries(static_cast<uint32_t>(options_.config.shm.ring_entries));
    limits->set_shm_total_bytes(static_cast<uint64_t>(options_.config.shm.total_bytes));
    limits->set_shm_regions_max(static_cast<uint32_t>(options_.config.shm.regions_max));
    limits->set_shm_tenant_regions(static_cast<uint32_t>(options_.config.shm.tenant_regions));
  }
}

void AdminService::FillBackends(v1::GetServerInfoReply* reply) const {
  const kernels::BackendInfo& info = rpc_.engine->backend_info();
  v1::Backend* chosen = reply->mutable_backend();
  chosen->set_name(info.name);
  chosen->set_description(info.description);
  chosen->set_device(info.device);
  chosen->set_arch(info.arch);
  chosen->set_units(static_cast<uint32_t>(info.units));
  chosen->set_chosen(true);
  reply->set_supported_shapes(info.supported);
  for (const kernels::BackendNote& note : info.notes) {
    v1::BackendNote* const added = reply->add_notes();
    added->set_name(note.name);
    added->set_text(note.text);
  }
  for (const kernels::BackendCandidate& candidate : options_.candidates) {
    v1::Backend* backend = reply->add_backends();
    if (candidate.chosen) *backend = *chosen;
    backend->set_name(candidate.name);
    backend->set_rank(candidate.rank);
    backend->set_chosen(candidate.chosen);
    backend->set_reason(candidate.reason);
    backend->set_unused_hardware(candidate.unused_hardware);
    if (candidate.chosen) chosen->set_rank(candidate.rank);
  }
}

grpc::Status AdminService::GetServerInfo(grpc::ServerContext* context,
                                         const v1::GetServerInfoRequest*,
                                         v1::GetServerInfoReply* reply) {
  return rpc_.Serve(
      context, "Admin.GetServerInfo",
      [&](const Identity&) {
        reply->set_server_version(base::FullVersion());
        reply->set_api_version(base::kApiVersion);
        reply->set_boot_id(rpc_.boot_id);
        FillBackends(reply);
        FillLimits(reply->mutable_limits());
        reply->add_wire_dtypes(v1::DTYPE_BF16);
        reply->add_wire_dtypes(v1::DTYPE_F32);
        reply->add_kv_dtypes(v1::DTYPE_BF16);
        const std::vector<kernels::KvFormat>& formats = rpc_.engine->backend_info().kv_formats;
        for (const kernels::KvFormat format : formats) reply->add_kv_formats(ToProto(format));
        reply->set_fp8_compute(rpc_.engine->backend_info().fp8_compute);
        for (const char* profile : {"ABSORBED", "EXPANDED", "APPEND_ONLY"}) {
          reply->add_profiles(profile);
        }
        for (const char* capability : kCapabilities) reply->add_capabilities(capability);
        if (formats.size() > 1) reply->add_capabilities("fp8");
        if (rpc_.engine->backend_info().sparse) reply->add_capabilities("sparse");
        if (rpc_.engine->backend_info().selects) reply->add_capabilities("indexer");
        if (rpc_.engine->backend_info().projects) {
          reply->add_profiles("PROJECTED");
          reply->add_capabilities("projected");
          if (rpc_.engine->backend_info().projects_codes) {
            reply->add_capabilities("projected_e4m3");
          }
        }
        if (options_.ucx) reply->add_capabilities("ucx");
        if (options_.checkpoints) reply->add_capabilities("checkpoints");
        if (rpc_.engine->backend_info().windows) {
          for (const char* capability : {"window", "tails", "sinks"}) {
            reply->add_capabilities(capability);
          }
        }
        if (options_.shared_memory) {
          for (const char* capability : kSharedMemoryCapabilities)
            reply->add_capabilities(capability);
        }
        const auto up = std::chrono::steady_clock::now() - started_;
        reply->set_uptime_ms(static_cast<uint64_t>(
            std::chrono::duration_cast<std::chrono::milliseconds>(up).count()));
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

void FillStats(const StatSources& from, v1::GetStatsReply* reply) {
  const auto* descriptor = v1::GetStatsReply::descriptor();
  const auto* reflection = v1::GetStatsReply::GetReflection();
  for (const Stat& stat : AllStats()) {
    if (stat.field == nullptr) continue;
    const auto* field = descriptor->FindFieldByName(stat.field);
    const uint64_t value = stat.read(from);
    if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_UINT32) {
      reflection->SetUInt32(reply, field, static_cast<uint32_t>(value));
    } else {
      reflection->SetUInt64(reply, field, value);
    }
  }
}

grpc::Status AdminService::GetStats(grpc::ServerContext* context, const v1::GetStatsRequest*,
                                    v1::GetStatsReply* reply) {
  return rpc_.Serve(
      context, "Admin.GetStats",
      [&](const Identity&) {
        const scheduler::EngineStats stats = Stats();
        FillStats(
            {stats, rpc_.metrics->wire(), rpc_.metrics->checkpoints(), rpc_.metrics->hand_overs()},
            reply);
        reply->set_boot_id(rpc_.boot_id);
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

void AdminService::FillUpdate(const ServerState::Snapshot& snapshot,
                              v1::StatusUpdate* update) const {
  const scheduler::EngineStats stats = Stats();
  // Both enumerations have the same numbers for the states.
  update->set_state(static_cast<v1::ServerState>(snapshot.phase));
  update->set_percent(static_cast<uint32_t>(snapshot.percent));
  update->set_message(snapshot.message);
  update->set_boot_id(rpc_.boot_id);
  update->set_open_steps(Unsigned<uint32_t>(stats.open_steps));
  update->set_sequences(Unsigned<uint32_t>(stats.sequences));
}

grpc::Status AdminService::WatchStatus(grpc::ServerContext* context,
                                       const v1::WatchStatusRequest* request,
                                       grpc::ServerWriter<v1::StatusUpdate>* writer) {
  return rpc_.Serve(context, "Admin.WatchStatus", [&](const Identity& who) {
    const Watchers::Place place(options_.watchers, who.tenant);
    MLA_RETURN_IF_ERROR(place.Check("WatchStatus"));
    const uint32_t asked = request->interval_ms() == 0 ? 1000 : request->interval_ms();
    const auto interval = std::chrono::milliseconds(std::clamp<uint32_t>(asked, 100, 60000));
    v1::StatusUpdate update;
    ServerState::Snapshot now = options_.watchers->state().Get();
    while (!context->IsCancelled()) {
      FillUpdate(now, &update);
      if (!writer->Write(update) || now.phase == Phase::kStopped) break;
      const auto next = std::chrono::steady_clock::now() + interval;
      const uint64_t sent = now.version;
      while (now.version == sent && std::chrono::steady_clock::now() < next &&
             !context->IsCancelled()) {
        now = options_.watchers->state().WaitForChange(sent, kCancelPeriod);
      }
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<std::unique_ptr<HandOver>> AdminService::ConnectPeers(
    const v1::DrainRequest& request) const {
  std::vector<std::string> addresses = {request.to()};
  addresses.insert(addresses.end(), request.also_to().begin(), request.also_to().end());
  if (addresses.size() > kMostDrainPeers) {
    return RefuseField("also_to", absl::StrCat(request.also_to_size()),
                       absl::StrCat("at most ", kMostDrainPeers - 1, " entries"));
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (addresses[i].size() <= scheduler::kMostPeerBytes && IsHostAndPort(addresses[i])) continue;
    return RefuseField(DrainPeerField(i), absl::StrCat(addresses[i].size(), " bytes"),
                       absl::StrCat("HOST:PORT, at most ", scheduler::kMostPeerBytes, " bytes"),
                       "name_characters");
  }
  if (options_.connect_peers) return options_.connect_peers(addresses);
  return RefuseField("to", request.to(), "empty: this server has no tls.cert", "no_tls",
                     absl::StatusCode::kFailedPrecondition);
}

grpc::Status AdminService::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                                 v1::DrainReply* reply) {
  return rpc_.ServeOperator(context, "Admin.Drain", [&](const Identity& who) {
    const auto deadline = request->deadline_ms() == 0
                              ? rpc_.live->drain_deadline()
                              : std::chrono::milliseconds(request->deadline_ms());
    std::unique_ptr<HandOver> peers;
    DrainHandOver hand_over;
    if (!request->to().empty() || request->also_to_size() > 0) {
      MLA_ASSIGN_OR_RETURN(peers, ConnectPeers(*request));
      MLA_RETURN_IF_ERROR(peers->MakeThread());
      for (const v1::DrainPeer& peer : peers->asked()) {
        const bool takes = peer.message().empty();
        Log(takes ? LogLevel::kInfo : LogLevel::kWarning, "hand_over",
            {{"operator", who.tenant},
             {"to", peer.address()},
             {"free_bytes", peer.free_bytes()},
             {"message", peer.message()},
             {"reason", peer.reason()}});
      }
      hand_over = {peers->address(), [&] { peers->Start(); }, [&] { return peers->done(); },
                   [&] { peers->Stop(); }};
    }
    const DrainResult result =
        options_.drain->Run(deadline, /*for_good=*/false, peers == nullptr ? nullptr : &hand_over);
    if (result.refused) {
      return RefuseField("to", request->to(), "empty while the server drains: cancel the drain",
                         "draining", absl::StatusCode::kFailedPrecondition);
    }
    if (peers != nullptr) {
      reply->mutable_handed_over()->Assign(peers->outcomes().begin(), peers->outcomes().end());
      reply->mutable_peers()->Assign(peers->asked().begin(), peers->asked().end());
    }
    reply->set_drained(result.drained);
    reply->set_cancelled(result.cancelled);
    reply->set_aborted_steps(static_cast<uint32_t>(result.aborted_steps));
    reply->set_message(result.message);
    const auto rows_stayed = std::count_if(
        reply->handed_over().begin(), reply->handed_over().end(), [](const v1::HandedOver& one) {
          return one.outcome() != v1::HAND_OVER_OUTCOME_MOVED && one.rows() > 0;
        });
    reply->set_exits(request->exit() && !result.cancelled && rows_stayed == 0);
    if (request->exit() && rows_stayed > 0 && !result.cancelled) {
      // Stopping would lose the rows that `to` was given to keep.
      absl::StrAppend(reply->mutable_message(), "; the server stays, as ", rows_stayed,
                      " sequences with rows have not moved");
    }
    if (reply->exits()) options_.exit();
    return absl::OkStatus();
  });
}

grpc::Status AdminService::CancelDrain(grpc::ServerContext* context, const v1::CancelDrainRequest*,
                                       v1::CancelDrainReply* reply) {
  return rpc_.ServeOperator(context, "Admin.CancelDrain", [&](const Identity&) {
    reply->set_boot_id(rpc_.boot_id);
    if (options_.drain->Cancel()) return absl::OkStatus();
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     "no drain that could be cancelled is under way", {.reason = "not_draining"});
  });
}

// -------------------------------------------------------------------------------- Quotas, eviction

absl::Status AdminService::CheckTenant(const std::string& tenant) const {
  const auto limit = static_cast<size_t>(rpc_.engine->limits().max_name_bytes);
  if (IsTenantName(tenant, limit)) return absl::OkStatus();
  return RefuseField("tenant", absl::StrCat(tenant.size(), " bytes"),
                     absl::StrCat("1..", limit, " printable ASCII characters"), "name_characters");
}

grpc::Status AdminService::GetQuota(grpc::ServerContext* context,
                                    const v1::GetQuotaRequest* request, v1::GetQuotaReply* reply) {
  return rpc_.Serve(
      context, "Admin.GetQuota",
      [&](const Identity& who) {
        const scheduler::TenantTable& tenants = *rpc_.engine->tenants();
        const bool own =
            !request->all() && (request->tenant().empty() || request->tenant() == who.tenant);
        if (!request->tenant().empty()) MLA_RETURN_IF_ERROR(CheckTenant(request->tenant()));
        if (request->all() && !request->tenant().empty()) {
          return RefuseField("tenant", request->tenant(), "empty together with all");
        }
        const absl::Status allowed = rpc_.live->CheckOperator(who);
        if (!own) MLA_RETURN_IF_ERROR(allowed);
        if (request->all()) {
          // The server's own tenants, as of the warm-up, have names that no client can have.
          const auto most = static_cast<size_t>(rpc_.engine->limits().max_name_bytes);
          for (const TenantUsage& usage : tenants.Usages()) {
            if (IsTenantName(usage.name, most)) Fill(usage, reply->add_tenants());
          }
        } else {
          Fill(tenants.Usage(request->tenant().empty() ? who.tenant : request->tenant()),
               reply->add_tenants());
        }
        if (allowed.ok()) FillServer(tenants, reply);
        reply->set_boot_id(rpc_.boot_id);
        return absl::OkStatus();
      },
      CallClass::kReserved);
}

grpc::Status AdminService::SetQuota(grpc::ServerContext* context,
                                    const v1::SetQuotaRequest* request, v1::SetQuotaReply* reply) {
  return rpc_.ServeOperator(context, "Admin.SetQuota", [&](const Identity& who) {
    MLA_RETURN_IF_ERROR(CheckTenant(request->tenant()));
    scheduler::TenantQuota quota;
    MLA_RETURN_IF_ERROR(ParseQuota(*request, &quota));
    scheduler::TenantTable& tenants = *rpc_.engine->tenants();
    MLA_RETURN_IF_ERROR(tenants.SetQuota(request->tenant(), quota, request->reset()));
    LogOperator("quota_set", who, request->tenant(), request->ShortDebugString());
    Fill(tenants.Usage(request->tenant()), reply->mutable_quota());
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status AdminService::EvictSequences(grpc::ServerContext* context,
                                          const v1::EvictSequencesRequest* request,
                                          v1::EvictSequencesReply* reply) {
  return rpc_.ServeOperator(context, "Admin.EvictSequences", [&](const Identity& who) {
    const scheduler::Limits& limits = rpc_.engine->limits();
    MLA_RETURN_IF_ERROR(CheckTenant(request->tenant()));
    MLA_RETURN_IF_ERROR(CheckName(request->client_id(), "client_id", true, limits));
    if (request->sequence_ids_size() > limits.max_sequences) {
      return RefuseField("sequence_ids", absl::StrCat(request->sequence_ids_size()),
                         absl::StrCat("at most ", limits.max_sequences, " entries"));
    }
    // Everything of a tenant is released only if the request says so explicitly.
    const int ways =
        (request->sequence_ids_size() > 0) + !request->client_id().empty() + request->all();
    if (ways != 1) {
      return RefuseField("sequence_ids", absl::StrCat(ways, " of them"),
                         "given, or client_id given, or all: one of the three", "inconsistent");
    }
    scheduler::SequenceSelection selection;
    selection.tenant = request->tenant();
    selection.ids.assign(request->sequence_ids().begin(), request->sequence_ids().end());
    selection.client_id = request->client_id();
    std::vector<scheduler::SequenceId> not_found;
    const int32_t evicted =
        EvictAndGiveUp(rpc_.engine, rpc_.abandoned, request->attempt(), selection, &not_found);
    LogOperator("sequences_evicted", who, request->tenant(), absl::StrCat(evicted));
    reply->set_evicted(static_cast<uint32_t>(evicted));
    reply->mutable_not_found()->Add(not_found.begin(), not_found.end());
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status AdminService::EvictModel(grpc::ServerContext* context,
                                      const v1::EvictModelRequest* request,
                                      v1::EvictModelReply* reply) {
  return rpc_.ServeOperator(context, "Admin.EvictModel", [&](const Identity& who) {
    absl::Status status = CheckTenant(request->tenant());
    if (status.ok()) {
      status = CheckName(request->model_id(), "model_id", false, rpc_.engine->limits());
    }
    if (!status.ok()) return status;
    MLA_ASSIGN_OR_RETURN(const int32_t evicted,
                         rpc_.engine->EvictModel(request->tenant(), request->model_id()));
    LogOperator("model_evicted", who, request->tenant(), request->model_id());
    reply->set_evicted_sequences(static_cast<uint32_t>(evicted));
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

}  // namespace mla::server
