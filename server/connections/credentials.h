// Makes server credentials for listeners that are not on loopback: mutual TLS with PEM files.
//
// A new connection uses the files that TlsFiles has in use at that time. Clients are identified by
// their certificates (identity.h). A client whose certificate is on a revocation list is refused at
// every call, even on connections that exist already.
#ifndef MLA_SERVER_CONNECTIONS_CREDENTIALS_H_
#define MLA_SERVER_CONNECTIONS_CREDENTIALS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/connections/tls_files.h"

namespace mla::server {

// Clients must present a certificate of tls.client_ca. Shares `files`.
std::shared_ptr<grpc::ServerCredentials> MutualTls(std::shared_ptr<TlsFiles> files);

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_CREDENTIALS_H_
