// A control service whose large requests are admitted before they are parsed.
//
// gRPC parses the request of a unary call before its handler runs. A parsed message may take thirty
// times its bytes (a repeated field with entries of two bytes). So the calls of one client could
// take all memory before a handler sees the first of them. A BoundedService stands between gRPC and
// such a service: it keeps a request unparsed until `admit` has counted its bytes among the
// caller's, and then parses it. It refuses requests full of unknown fields, which take a hundred
// times their bytes. They are counted until just after the call was answered.
//
// Large requests with a prefix also take turns (server/admission). `begin_turn` waits for the
// caller's turn, which lasts until the prefix has been hashed or the call is answered.
//
// The class uses the same parts of gRPC as the generated code: handlers, and a service's table of
// methods. Client streams are not changed, because their handlers read bytes already
// (server/lifecycle/upload_reader.h).
//
// Threading: `admit` and `begin_turn` are called from any thread.
#ifndef MLA_SERVER_CONNECTIONS_BOUNDED_SERVICE_H_
#define MLA_SERVER_CONNECTIONS_BOUNDED_SERVICE_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/tenant_table.h"

namespace mla::server {

// Counts `bytes`, the size of a serialized request, for the caller, or refuses the call.
using AdmitRequest = std::function<absl::StatusOr<scheduler::TenantUse>(
    const grpc::ServerContextBase& caller, int64_t bytes)>;

// Begins a turn of the calling thread (PrefixTurns), or returns the reason for refusing one.
using BeginTurn = std::function<absl::Status(const grpc::ServerContextBase& caller)>;

// Smaller requests are not counted: all threads together hold few of them. Leases and
// administration must also get through when larger requests fill the bound.
inline constexpr int64_t kUncountedRequestBytes = 16384;

class BoundedService final : public grpc::Service {
 public:
  // `service` implements `contract` with synchronous handlers. It must outlive this object and must
  // not be registered itself.
  BoundedService(grpc::Service* service, const google::protobuf::ServiceDescriptor& contract,
                 AdmitRequest admit, BeginTurn begin_turn);

 private:
  const AdmitRequest admit_;
  const BeginTurn begin_turn_;
  std::vector<std::string> names_;  // such as "/mla.v1.Sequences/Open"; gRPC keeps pointers to them
};

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_BOUNDED_SERVICE_H_
