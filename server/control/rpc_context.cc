#include "server/control/rpc_context.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

using scheduler::Resource;

absl::StatusOr<scheduler::TenantUse> TakeBytes(scheduler::TenantTable* tenants,
                                               const std::string& name, int64_t bytes) {
  MLA_ASSIGN_OR_RETURN(scheduler::TenantRef tenant, tenants->Enter(name));
  MLA_RETURN_IF_ERROR(tenants->Take(*tenant, Resource::kControlBytes, bytes, "request"));
  return scheduler::TenantUse(tenants, std::move(tenant), Resource::kControlBytes, bytes);
}

}  // namespace

absl::StatusOr<scheduler::TenantUse> RpcContext::Admit(const Identity& who,
                                                       CallClass call_class) const {
  scheduler::TenantTable& tenants = *engine->tenants();
  const bool reserved = call_class == CallClass::kReserved;
  absl::StatusOr<scheduler::TenantRef> tenant = tenants.Enter(who.tenant);
  absl::Status status = tenant.status();
  if (status.ok()) {
    status =
        tenants.Take(**tenant, Resource::kControlCalls, 1, "call", reserved ? control_reserve : 0);
  } else if (reserved) {
    // A tenant without a row holds nothing, so its reads cost little; and an operator must always
    // be admitted.
    return scheduler::TenantUse();
  }
  if (!status.ok()) {
    metrics->CountRejected(DetailOf(status).reason);
    return status;
  }
  return scheduler::TenantUse(&tenants, *std::move(tenant), Resource::kControlCalls, 1);
}

absl::StatusOr<scheduler::TenantUse> RpcContext::AdmitRequest(const grpc::ServerContextBase& caller,
                                                              int64_t bytes) const {
  const auto identity =
      Identify(caller, static_cast<size_t>(engine->limits().max_name_bytes), unix_tenant);
  if (!identity.ok()) {
    Note("unparsed request", "", identity.status());
    return identity.status();
  }
  auto use = TakeBytes(engine->tenants().get(), identity->tenant, bytes);
  if (!use.ok()) {
    metrics->CountRejected(DetailOf(use.status()).reason);
    Note("unparsed request", identity->tenant, use.status());
  }
  return use;
}

absl::Status RpcContext::CheckActsFor(const Identity& who, const std::string& tenant,
                                      const std::string& field) const {
  const auto limit = static_cast<size_t>(engine->limits().max_name_bytes);
  if (!IsTenantName(tenant, limit)) {
    return RefuseField(field, absl::StrCat(tenant.size(), " bytes"),
                       absl::StrCat("1..", limit, " printable ASCII characters"),
                       "name_characters");
  }
  MLA_RETURN_IF_ERROR(live->CheckOperator(who));
  if (who.authenticated && !who.local) return absl::OkStatus();
  return RefuseField(field, "a caller without TLS", "an operator over TLS", "not_an_operator",
                     absl::StatusCode::kPermissionDenied);
}

absl::Status RpcContext::BeginTurn(const grpc::ServerContextBase& caller) const {
  MLA_ASSIGN_OR_RETURN(
      const auto identity,
      Identify(caller, static_cast<size_t>(engine->limits().max_name_bytes), unix_tenant));
  // Counts the thread while it waits; the call itself is admitted again once it is parsed.
  MLA_ASSIGN_OR_RETURN(const scheduler::TenantUse slot, Admit(identity, CallClass::kOrdinary));
  MLA_ASSIGN_OR_RETURN(const scheduler::TenantRef tenant,
                       engine->tenants()->Enter(identity.tenant));
  const auto given_up = [&caller] { return caller.IsCancelled(); };
  if (turns->Begin(tenant->key(), tenant->weight(), given_up)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kCancelled, "the client has given the call up",
                   {.reason = "cancelled"});
}

void RpcContext::Note(const char* rpc, const std::string& tenant, const absl::Status& status,
                      const std::string& trace_id) const {
  metrics->ForTenant(tenant.empty() ? "unknown" : tenant)->Count(status.code());
  LogFields fields = {
      {"rpc", rpc}, {"tenant", tenant}, {"code", absl::StatusCodeToString(status.code())}};
  if (!trace_id.empty()) fields.emplace_back("trace_id", trace_id);
  Log(LogLevel::kDebug, "rpc", fields);
}

std::string RpcContext::Trace(const grpc::ServerContextBase& context, const char* rpc,
                              const std::string& tenant, const absl::Status& status,
                              int64_t began_ns) const {
  if (tracer == nullptr || !tracer->on()) return "";
  const TraceContext parent = TraceOf(context);
  const TraceContext own = tracer->Sample(parent, tenant);
  if (!own.valid()) return "";
  TraceSpan span;
  span.trace = own.trace;
  span.id = own.span;
  span.parent = parent.span;
  span.name = rpc;
  span.server = true;
  span.begin_ns = began_ns;
  span.end_ns = Tracer::Now();
  span.tenant = tenant;
  span.error = SpanError(status);
  tracer->Record({std::move(span)});
  return TraceIdText(own.trace);
}

}  // namespace mla::server
