// Identifies the caller: the tenant for which an RPC acts.
//
// Over mutual TLS the tenant is the name in the client certificate: its first subject alternative
// name, DNS or URI or another kind, else its common name. Metadata is ignored then. Without TLS
// (loopback, unix socket, --insecure) it is the metadata key `mla-tenant`, by default "default".
// The configuration may fix the tenant of all callers over the unix socket, whatever they send.
//
// Operators are the callers that may change the server for all tenants (CheckOperator).
#ifndef MLA_SERVER_GRPC_IDENTITY_H_
#define MLA_SERVER_GRPC_IDENTITY_H_

#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "scheduler/request.h"
#include "server/tracing/trace_context.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace mla::server {

inline constexpr char kTenantKey[] = "mla-tenant";

struct Identity {
  std::string tenant;
  bool authenticated = false;  // named by a client certificate, or by server.unix_tenant
  bool local = false;          // connected by a unix socket or from a loopback address
};

// Names the callers that may use the RPCs for operators. Metadata never makes an operator, because
// any caller can send any name.
struct OperatorPolicy {
  std::set<std::string> tenants;    // names in client certificates
  bool local_without_tls = true;    // callers without TLS on this host are operators
  bool remote_without_tls = false;  // ... and on others
};

// UNAUTHENTICATED: a TLS peer has no usable name. INVALID_ARGUMENT: the name is empty, longer than
// `max_name_bytes`, or has bytes that are not printable ASCII. `unix_tenant` is server.unix_tenant.
absl::StatusOr<Identity> Identify(const grpc::ServerContextBase& context, size_t max_name_bytes,
                                  const std::string& unix_tenant = "");

// Returns the tenant of a caller over a unix socket who has given `name` (may be empty):
// `unix_tenant` unless that is empty or "*", else the name, else "default".
std::string UnixTenant(const std::string& unix_tenant, const std::string& name);

// Returns true if `peer`, in gRPC's spelling of addresses, is a unix socket or a loopback address.
bool IsLocalPeer(const std::string& peer);

// Returns OK if `who` may call operator RPCs: authenticated tenants of the policy, callers without
// TLS on this host or others as far as the policy says so. Otherwise returns PERMISSION_DENIED with
// the reason "not_an_operator".
absl::Status CheckOperator(const Identity& who, const OperatorPolicy& policy);

// Returns the trace context that a caller sent in metadata; invalid if there is none.
TraceContext TraceOf(const grpc::ServerContextBase& context);

// Returns true if `name` is a valid name of a tenant.
bool IsTenantName(const std::string& name, size_t max_name_bytes);

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_IDENTITY_H_
