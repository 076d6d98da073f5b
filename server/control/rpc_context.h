// The common frame of all control RPCs.
//
// Every control RPC runs through Serve: it finds the tenant, runs the body, converts the status and
// counts the call. So bodies hold only the code specific to them.
//
// Ownership: plain references; everything must outlive the services. Threading: any thread.
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
#include "server/tracing/tracer.h"

namespace mla::server {

// Says how many of the serving threads a control call may take.
enum class CallClass : uint8_t {
  kOrdinary,
  kReserved,  // leases and administration, which may also use the reserve
};

struct RpcContext {
  scheduler::Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  uint64_t boot_id = 0;
  const LiveSettings* live = nullptr;  // outlives the context
  // control calls that only CallClass::kReserved may use
  int32_t control_reserve = 0;
  std::string unix_tenant = {};  // server.unix_tenant
  // imports that other servers have given up; must outlive the context
  AbandonedImports* abandoned = nullptr;
  PrefixTurns* turns = nullptr;  // outlives the context too
  Tracer* tracer = nullptr;      // outlives it too; null: no traces

  // Like Serve, for RPCs that change the server for all tenants: PERMISSION_DENIED for callers that
  // are not operators.
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
    const int64_t began_ns = tracer != nullptr ? Tracer::Now() : 0;
    absl::Status status = identity.status();
    if (status.ok()) {
      const absl::StatusOr<scheduler::TenantUse> slot = Admit(*identity, call_class);
      status = slot.ok() ? body(*identity) : slot.status();
    }
    const std::string tenant = identity.ok() ? identity->tenant : "";
    const std::string trace_id = Trace(*context, rpc, tenant, status, began_ns);
    Note(rpc, tenant, status, trace_id);
    return ToGrpcStatus(status, context, trace_id);
  }

  // Counts a call until the result is destroyed. RESOURCE_EXHAUSTED if the tenant, or all tenants
  // together, already have as many control calls under way as allowed.
  absl::StatusOr<scheduler::TenantUse> Admit(const Identity& who, CallClass call_class) const;
  // Checks a field that names the tenant for whom another server acts: a printable name. Only
  // operators over TLS may name one, so that nothing of a tenant comes unencrypted from another
  // machine, or from an anonymous caller.
  absl::Status CheckActsFor(const Identity& who, const std::string& tenant,
                            const std::string& field) const;
  // Counts the bytes of a request for its caller before it is parsed; for BoundedService.
  // RESOURCE_EXHAUSTED beyond wire.control_bytes or the tenant's control_bytes; otherwise the
  // errors of Identify.
  absl::StatusOr<scheduler::TenantUse> AdmitRequest(const grpc::ServerContextBase& caller,
                                                    int64_t bytes) const;
  // Begins the calling thread's turn of parsing and hashing a prefix. RESOURCE_EXHAUSTED as for
  // Admit, since waiting calls hold threads; CANCELLED if the client gives up.
  absl::Status BeginTurn(const grpc::ServerContextBase& caller) const;
  // Counts a finished call and logs it at debug level.
  void Note(const char* rpc, const std::string& tenant, const absl::Status& status,
            const std::string& trace_id = "") const;
  // Records the span of a finished call that began at `began_ns` (Tracer::Now), if it is traced.
  // Returns its trace id, or "".
  std::string Trace(const grpc::ServerContextBase& context, const char* rpc,
                    const std::string& tenant, const absl::Status& status, int64_t began_ns) const;
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONTROL_RPC_CONTEXT_H_
