// What every control RPC needs, and the frame in which each of them runs.
//
// Serve is the one way into a control RPC: it finds the tenant, runs the body, converts the status
// and counts the call. Bodies therefore hold only what is particular to them.
//
// Ownership: plain references; everything outlives the services. Threading: any thread.
#ifndef MLA_SERVER_CONTROL_RPC_CONTEXT_H_
#define MLA_SERVER_CONTROL_RPC_CONTEXT_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/engine.h"
#include "scheduler/tenant_table.h"
#include "server/admission/prefix_turns.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/identity.h"
#include "server/hand_over/abandoned_imports.h"
#include "server/metrics/metrics.h"
#include "server/reload/live_settings.h"

namespace mla::server {

// What a control call may take of the threads that serve them.
enum class CallClass : uint8_t {
  kOrdinary,
  kReserved,  // leases and administration: also from the reserve
};

struct RpcContext {
  scheduler::Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  uint64_t boot_id = 0;
  const LiveSettings* live = nullptr;  // outlives the context
  // Control calls beyond the bounds that CallClass::kReserved may take.
  int32_t control_reserve = 0;
  std::string unix_tenant = {};  // server.unix_tenant
  // Tries to import that other servers have given up; outlives the context.
  AbandonedImports* abandoned = nullptr;
  PrefixTurns* turns = nullptr;  // likewise

  // Like Serve, for RPCs that change the server for all tenants: PERMISSION_DENIED for callers
  // that are no operators.
  template <typename Body>
  grpc::Status ServeOperator(grpc::ServerContext* context, const char* rpc, Body body) const {
    return Serve(
        context, rpc,
        [&](const Identity& who) {
          const absl::Status allowed = live->CheckOperator(who);
          return allowed.ok() ? body(who) : allowed;
        },
        CallClass::kReserved);
  }

  // body(const Identity&) -> absl::Status
  template <typename Body>
  grpc::Status Serve(grpc::ServerContext* context, const char* rpc, Body body,
                     CallClass call_class = CallClass::kOrdinary) const {
    const auto identity =
        Identify(*context, static_cast<size_t>(engine->limits().max_name_bytes), unix_tenant);
    absl::Status status = identity.status();
    if (status.ok()) {
      const absl::StatusOr<scheduler::TenantUse> slot = Admit(*identity, call_class);
      status = slot.ok() ? body(*identity) : slot.status();
    }
    Note(rpc, identity.ok() ? identity->tenant : "", status);
    return ToGrpcStatus(status, context);
  }

  // RESOURCE_EXHAUSTED when the tenant, or all tenants together, have as many control calls under
  // way as they may.
  absl::StatusOr<scheduler::TenantUse> Admit(const Identity& who, CallClass call_class) const;
  // Counts a request that is not parsed yet among its caller's, for BoundedService.
  // RESOURCE_EXHAUSTED beyond wire.control_bytes or the tenant's control_bytes; the codes of
  // Identify.
  absl::StatusOr<scheduler::TenantUse> AdmitRequest(const grpc::ServerContextBase& caller,
                                                    int64_t bytes) const;
  // Begins the calling thread's turn of parsing and hashing a prefix. RESOURCE_EXHAUSTED as of
  // Admit, since calls that wait for theirs hold threads; CANCELLED if the client gives up.
  absl::Status BeginTurn(const grpc::ServerContextBase& caller) const;
  // Counts a finished call and logs it at debug level.
  void Note(const char* rpc, const std::string& tenant, const absl::Status& status) const;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_RPC_CONTEXT_H_
