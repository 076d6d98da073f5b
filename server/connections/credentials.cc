#include "server/connections/credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::server {
namespace {

// State that gRPC's callbacks use. Lives as long as gRPC's credentials.
struct Shared {
  std::shared_ptr<TlsFiles> files;
  Mutex mutex;
  std::shared_ptr<const TlsMaterial> given ABSL_GUARDED_BY(mutex);  // to gRPC, last
};

// gRPC calls this for every new connection.
grpc_ssl_certificate_config_reload_status Renew(void* state,
                                                grpc_ssl_server_certificate_config** config) {
  auto* const shared = static_cast<Shared*>(state);
  const std::shared_ptr<const TlsMaterial> material = shared->files->current();
  const MutexLock lock(shared->mutex);
  if (material == shared->given) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  const grpc_ssl_pem_key_cert_pair pair = {material->key.c_str(), material->cert.c_str()};
  *config = grpc_ssl_server_certificate_config_create(material->client_ca.c_str(), &pair, 1);
  shared->given = material;
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

bool HasRevoked(const TlsFiles& files, const grpc_auth_context* context, const char* property) {
  grpc_auth_property_iterator all = grpc_auth_context_find_properties_by_name(context, property);
  while (const grpc_auth_property* one = grpc_auth_property_iterator_next(&all)) {
    if (files.IsRevoked(std::string(one->value, one->value_length))) return true;
  }
  return false;
}

// gRPC calls this for every call.
void CheckPeer(void* state, grpc_auth_context* context, const grpc_metadata*, size_t,
               grpc_process_auth_metadata_done_cb done, void* user_data) {
  const TlsFiles& files = *static_cast<Shared*>(state)->files;
  const bool revoked = HasRevoked(files, context, GRPC_X509_PEM_CERT_PROPERTY_NAME) ||
                       HasRevoked(files, context, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME);
  done(user_data, nullptr, 0, nullptr, 0, revoked ? GRPC_STATUS_UNAUTHENTICATED : GRPC_STATUS_OK,
       revoked ? "the client certificate is revoked" : nullptr);
}

class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(std::shared_ptr<TlsFiles> files) {
    auto* const shared = new Shared;
    shared->files = std::move(files);
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, Renew, shared));
    grpc_server_credentials_set_auth_metadata_processor(
        credentials_, {CheckPeer, [](void* state) { delete static_cast<Shared*>(state); }, shared});
  }
  ~ReloadingCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* credentials_ = nullptr;
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MutualTls(std::shared_ptr<TlsFiles> files) {
  return std::make_shared<ReloadingCredentials>(std::move(files));
}

}  // namespace mla::server
