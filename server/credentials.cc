#include "server/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using File = std::unique_ptr<BIO, Deleter<BIO, BIO_free_all>>;

// A server has nobody to ask: encrypted keys are refused instead of prompting on the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

absl::Status Bad(const char* key, const std::string& path, const char* what) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, ": ", what));
}

absl::StatusOr<Certificate> ReadCertificate(const char* key, const std::string& path) {
  const File file(BIO_new_file(path.c_str(), "r"));
  if (file == nullptr) return Bad(key, path, "cannot be read");
  Certificate certificate(PEM_read_bio_X509(file.get(), nullptr, NoPassword, nullptr));
  if (certificate == nullptr) return Bad(key, path, "holds no PEM certificate");
  return certificate;
}

}  // namespace

absl::Status CheckTlsFiles(const Config::Tls& tls) {
  const auto certificate = ReadCertificate("tls.cert", tls.cert);
  if (!certificate.ok()) return certificate.status();
  const auto authority = ReadCertificate("tls.client_ca", tls.client_ca);
  if (!authority.ok()) return authority.status();
  const File file(BIO_new_file(tls.key.c_str(), "r"));
  if (file == nullptr) return Bad("tls.key", tls.key, "cannot be read");
  const PrivateKey key(PEM_read_bio_PrivateKey(file.get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) return Bad("tls.key", tls.key, "holds no unencrypted PEM private key");
  if (X509_check_private_key(certificate->get(), key.get()) != 1) {
    return Bad("tls.key", tls.key, "does not belong to tls.cert");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MutualTls(const Config::Tls& tls) {
  if (absl::Status status = CheckTlsFiles(tls); !status.ok()) return status;
  const auto seconds = static_cast<unsigned>(std::max<int64_t>(tls.reload_ms / 1000, 1));
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(tls.key, tls.cert,
                                                                           tls.client_ca, seconds));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace mla::server
