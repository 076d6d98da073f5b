// Server credentials for listeners beyond loopback: mutual TLS from PEM files.
//
// The files are looked at again every tls.reload_ms, so renewed certificates are used for new
// connections without a restart. Clients must present a certificate of tls.client_ca; who they are
// is read from it (identity.h).
#ifndef MLA_SERVER_CREDENTIALS_H_
#define MLA_SERVER_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config.h"

namespace mla::server {

// INVALID_ARGUMENT naming the key: a file that cannot be read, holds no PEM of its kind, or a
// private key that does not belong to the certificate.
absl::Status CheckTlsFiles(const Config::Tls& tls);

// REQUIRES: all three files are named. Fails like CheckTlsFiles.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MutualTls(const Config::Tls& tls);

}  // namespace mla::server

#endif  // MLA_SERVER_CREDENTIALS_H_
