#include "server/rpc_context.h"

#include "server/logging.h"

namespace mla::server {

void RpcContext::Note(const char* rpc, const std::string& tenant,
                      const absl::Status& status) const {
  metrics->ForTenant(tenant.empty() ? "unknown" : tenant)->Count(status.code());
  Log(LogLevel::kDebug, "rpc",
      {{"rpc", rpc}, {"tenant", tenant}, {"code", CodeName(status.code())}});
}

}  // namespace mla::server
