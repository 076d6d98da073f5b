#include "server/identity.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

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

absl::StatusOr<Identity> Identify(const grpc::ServerContextBase& context, size_t max_name_bytes) {
  Identity identity;
  const auto auth = context.auth_context();
  const std::string transport =
      auth == nullptr ? "" : FirstProperty(*auth, GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  if (transport == "ssl" || transport == "tls") {
    identity.authenticated = true;
    identity.tenant = FirstProperty(*auth, GRPC_X509_SAN_PROPERTY_NAME);
    if (identity.tenant.empty()) identity.tenant = FirstProperty(*auth, GRPC_X509_CN_PROPERTY_NAME);
    if (!IsTenantName(identity.tenant, max_name_bytes)) {
      return absl::UnauthenticatedError("the client certificate carries no usable name");
    }
    return identity;
  }
  identity.tenant = "default";
  const auto& metadata = context.client_metadata();
  if (const auto found = metadata.find(kTenantKey); found != metadata.end()) {
    identity.tenant.assign(found->second.data(), found->second.size());
  }
  if (!IsTenantName(identity.tenant, max_name_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("metadata ", kTenantKey, ": must be 1..",
                                                   max_name_bytes, " printable ASCII characters"));
  }
  return identity;
}

}  // namespace mla::server
