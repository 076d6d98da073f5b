#include "server/grpc/identity.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {
namespace {

std::string FirstProperty(const grpc::AuthContext& auth, const char* name) {
  for (const grpc::string_ref& value : auth.FindPropertyValues(name)) {
    if (!value.empty()) return std::string(value.data(), value.size());
  }
  return "";
}

}  // namespace

bool IsTenantName(const std::string& name, size_t max_name_bytes) {
  return !name.empty() && name.size() <= max_name_bytes &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

bool IsLocalPeer(const std::string& peer) {
  // Some versions of gRPC escape the brackets of IPv6 addresses.
  return absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "unix-abstract:") ||
         absl::StartsWith(peer, "ipv4:127.") || absl::StartsWith(peer, "ipv6:[::1]:") ||
         absl::StartsWith(peer, "ipv6:%5B::1%5D:") || absl::StartsWith(peer, "ipv6:[::ffff:127.") ||
         absl::StartsWith(peer, "ipv6:%5B::ffff:127.");
}

absl::Status CheckOperator(const Identity& who, const OperatorPolicy& policy) {
  if (who.authenticated) {
    if (policy.tenants.count(who.tenant) != 0) return absl::OkStatus();
    return RefuseField("caller", who.tenant, "a tenant of server.operators", "not_an_operator",
                       absl::StatusCode::kPermissionDenied);
  }
  if (who.local ? policy.local_without_tls : policy.remote_without_tls) return absl::OkStatus();
  return RefuseField("caller",
                     who.local ? "a caller without TLS" : "a caller without TLS on another host",
                     policy.local_without_tls
                         ? "on the server's own host, or over TLS a tenant of server.operators"
                         : "over TLS a tenant of server.operators",
                     "not_an_operator", absl::StatusCode::kPermissionDenied);
}

std::string UnixTenant(const std::string& unix_tenant, const std::string& name) {
  if (!unix_tenant.empty() && unix_tenant != "*") return unix_tenant;
  return name.empty() ? "default" : name;
}

absl::StatusOr<Identity> Identify(const grpc::ServerContextBase& context, size_t max_name_bytes,
                                  const std::string& unix_tenant) {
  const std::string limit = absl::StrCat("1..", max_name_bytes, " printable ASCII characters");
  Identity identity;
  const auto auth = context.auth_context();
  const std::string transport =
      auth == nullptr ? "" : FirstProperty(*auth, GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  if (transport == "ssl" || transport == "tls") {
    identity.authenticated = true;
    identity.tenant = FirstProperty(*auth, GRPC_X509_SAN_PROPERTY_NAME);
    if (identity.tenant.empty()) identity.tenant = FirstProperty(*auth, GRPC_X509_CN_PROPERTY_NAME);
    if (!IsTenantName(identity.tenant, max_name_bytes)) {
      return MakeError(absl::StatusCode::kUnauthenticated,
                       "the client certificate carries no usable name",
                       {.field = "client certificate",
                        .got = absl::StrCat("a name of ", identity.tenant.size(), " bytes"),
                        .limit = limit,
                        .reason = "name_characters"});
    }
    return identity;
  }
  identity.local = IsLocalPeer(context.peer());
  if (absl::StartsWith(context.peer(), "unix:") && UnixTenant(unix_tenant, "") == unix_tenant) {
    identity.tenant = unix_tenant;
    identity.authenticated = true;
    return identity;
  }
  identity.tenant = "default";
  const auto& metadata = context.client_metadata();
  if (const auto found = metadata.find(kTenantKey); found != metadata.end()) {
    identity.tenant.assign(found->second.data(), found->second.size());
  }
  if (!IsTenantName(identity.tenant, max_name_bytes)) {
    // The error does not repeat the name, which may be too long or unprintable.
    return MakeError(absl::StatusCode::kInvalidArgument,
                     absl::StrCat("metadata ", kTenantKey, ": must be ", limit),
                     {.field = absl::StrCat("metadata.", kTenantKey),
                      .got = absl::StrCat("a name of ", identity.tenant.size(), " bytes"),
                      .limit = limit,
                      .reason = "name_characters"});
  }
  return identity;
}

TraceContext TraceOf(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kTraceparentKey);
  if (found == metadata.end()) return {};
  return ParseTraceparent({found->second.data(), found->second.size()});
}

}  // namespace mla::server
