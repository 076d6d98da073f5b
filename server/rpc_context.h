// What every control RPC needs, and the frame in which each of them runs.
//
// Serve is the one way into a control RPC: it finds the tenant, runs the body, converts the status
// and counts the call. Bodies therefore hold only what is particular to them.
//
// Ownership: plain references; everything outlives the services. Threading: any thread.
#ifndef MLA_SERVER_RPC_CONTEXT_H_
#define MLA_SERVER_RPC_CONTEXT_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "scheduler/engine.h"
#include "server/grpc_status.h"
#include "server/identity.h"
#include "server/metrics.h"

namespace mla::server {

struct RpcContext {
  scheduler::Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  uint64_t boot_id = 0;
  OperatorPolicy operators = {};

  // Like Serve, for RPCs that change the server for all tenants: PERMISSION_DENIED for callers
  // that are no operators.
  template <typename Body>
  grpc::Status ServeOperator(grpc::ServerContext* context, const char* rpc, Body body) const {
    return Serve(context, rpc, [&](const Identity& who, scheduler::Fault* fault) {
      const absl::Status allowed = CheckOperator(who, operators, fault);
      return allowed.ok() ? body(who, fault) : allowed;
    });
  }

  // body(const Identity&, scheduler::Fault*) -> absl::Status
  template <typename Body>
  grpc::Status Serve(grpc::ServerContext* context, const char* rpc, Body body) const {
    scheduler::Fault fault;
    const auto identity =
        Identify(*context, static_cast<size_t>(engine->limits().max_name_bytes), &fault);
    const absl::Status status = identity.ok() ? body(*identity, &fault) : identity.status();
    Note(rpc, identity.ok() ? identity->tenant : "", status);
    return ToGrpcStatus(status, fault, context);
  }

  // Counts a finished call and logs it at debug level.
  void Note(const char* rpc, const std::string& tenant, const absl::Status& status) const;
};

}  // namespace mla::server

#endif  // MLA_SERVER_RPC_CONTEXT_H_
