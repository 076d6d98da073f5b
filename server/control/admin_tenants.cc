// AdminService: quotas and eviction.
#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/control/admin_service.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/request_validator.h"
#include "server/hand_over/take_over.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

using scheduler::kUnbounded;
using scheduler::Resource;
using scheduler::ResourceRow;
using scheduler::TenantUsage;

// Both enumerations number alike.
static_assert(static_cast<int>(Resource::kKvBytes) == v1::QUOTA_RESOURCE_KV_BYTES);
static_assert(static_cast<int>(Resource::kControlCalls) == v1::QUOTA_RESOURCE_CONTROL_CALLS);
static_assert(static_cast<int>(Resource::kPrefixTokens) == v1::QUOTA_RESOURCE_PREFIX_TOKENS);
static_assert(static_cast<int>(Resource::kControlBytes) == v1::QUOTA_RESOURCE_CONTROL_BYTES);
static_assert(static_cast<int>(Resource::kTailBytes) == v1::QUOTA_RESOURCE_TAIL_BYTES);
static_assert(scheduler::kResourceCount == v1::QuotaResource_ARRAYSIZE - 1);
static_assert(static_cast<int>(scheduler::BoundSource::kRuntime) == v1::QUOTA_SOURCE_RUNTIME);

constexpr size_t kMostBounds = 4 * scheduler::kResourceCount;

void Fill(const TenantUsage& from, v1::TenantQuota* to) {
  to->set_tenant(from.name);
  to->set_weight(static_cast<uint32_t>(from.weight));
  for (const ResourceRow& row : scheduler::ResourceRows()) {
    v1::QuotaUsage* usage = to->add_resources();
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

absl::Status AdminService::CheckTenant(const std::string& tenant) const {
  const auto most = static_cast<size_t>(rpc_.engine->limits().max_name_bytes);
  if (IsTenantName(tenant, most)) return absl::OkStatus();
  return RefuseField("tenant", absl::StrCat(tenant.size(), " bytes"),
                     absl::StrCat("1..", most, " printable ASCII characters"), "name_characters");
}

grpc::Status AdminService::GetQuota(grpc::ServerContext* context,
                                    const v1::GetQuotaRequest* request, v1::GetQuotaReply* reply) {
  return rpc_.Serve(
      context, "Admin.GetQuota",
      [&](const Identity& who) {
        const scheduler::TenantTable& tenants = *rpc_.engine->tenants();
        const bool own =
            !request->all() && (request->tenant().empty() || request->tenant() == who.tenant);
        absl::Status status = absl::OkStatus();
        if (!request->tenant().empty()) status = CheckTenant(request->tenant());
        if (status.ok() && request->all() && !request->tenant().empty()) {
          status = RefuseField("tenant", request->tenant(), "empty together with all");
        }
        const absl::Status allowed = rpc_.live->CheckOperator(who);
        if (status.ok() && !own) status = allowed;
        if (!status.ok()) return status;
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
    absl::Status status = CheckTenant(request->tenant());
    scheduler::TenantQuota quota;
    if (status.ok()) status = ParseQuota(*request, &quota);
    scheduler::TenantTable& tenants = *rpc_.engine->tenants();
    if (status.ok()) status = tenants.SetQuota(request->tenant(), quota, request->reset());
    if (!status.ok()) return status;
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
    absl::Status status = CheckTenant(request->tenant());
    if (status.ok()) status = CheckName(request->client_id(), "client_id", true, limits);
    if (status.ok() && request->sequence_ids_size() > limits.max_sequences) {
      status = RefuseField("sequence_ids", absl::StrCat(request->sequence_ids_size()),
                           absl::StrCat("at most ", limits.max_sequences, " entries"));
    }
    // Everything of a tenant is released only if the request says so explicitly.
    const int ways =
        (request->sequence_ids_size() > 0) + !request->client_id().empty() + request->all();
    if (status.ok() && ways != 1) {
      status = RefuseField("sequence_ids", absl::StrCat(ways, " of them"),
                           "given, or client_id given, or all: one of the three", "inconsistent");
    }
    if (!status.ok()) return status;
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
