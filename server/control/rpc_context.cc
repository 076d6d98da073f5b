#include "server/control/rpc_context.h"

#include "base/error.h"
#include "server/logging/logging.h"

namespace mla::server {

absl::StatusOr<CallSlot> RpcContext::Admit(const Identity& who, CallClass call_class) const {
  scheduler::TenantTable& tenants = *engine->tenants();
  const bool reserved = call_class == CallClass::kReserved;
  absl::StatusOr<scheduler::TenantRef> tenant = tenants.Enter(who.tenant);
  absl::Status status = tenant.status();
  if (status.ok()) {
    status = tenants.Take(**tenant, scheduler::Resource::kControlCalls, 1, "call",
                          reserved ? control_reserve : 0);
  } else if (reserved) {
    // Tenants without a row hold nothing, so their reads are cheap, and an operator must get in.
    return CallSlot();
  }
  if (!status.ok()) {
    metrics->CountRejected(DetailOf(status).reason);
    return status;
  }
  return CallSlot(&tenants, *std::move(tenant));
}

void RpcContext::Note(const char* rpc, const std::string& tenant,
                      const absl::Status& status) const {
  metrics->ForTenant(tenant.empty() ? "unknown" : tenant)->Count(status.code());
  Log(LogLevel::kDebug, "rpc",
      {{"rpc", rpc}, {"tenant", tenant}, {"code", absl::StatusCodeToString(status.code())}});
}

}  // namespace mla::server
