// Who is calling: the tenant on whose behalf an RPC acts.
//
// Over mutual TLS the tenant is the client certificate's name: its first DNS, URI or other subject
// alternative name, else its common name. Metadata is then ignored. Without TLS (loopback, unix
// socket, --insecure) it is the metadata key `mla-tenant`, by default "default".
#ifndef MLA_SERVER_IDENTITY_H_
#define MLA_SERVER_IDENTITY_H_

#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace mla::server {

inline constexpr char kTenantKey[] = "mla-tenant";

struct Identity {
  std::string tenant;
  bool authenticated = false;  // by a client certificate
};

// UNAUTHENTICATED: a TLS peer without a usable name. INVALID_ARGUMENT: a name that is empty, longer
// than `max_name_bytes`, or holds bytes outside printable ASCII.
absl::StatusOr<Identity> Identify(const grpc::ServerContextBase& context, size_t max_name_bytes);

// True if `name` can be a tenant's name.
bool IsTenantName(const std::string& name, size_t max_name_bytes);

}  // namespace mla::server

#endif  // MLA_SERVER_IDENTITY_H_
