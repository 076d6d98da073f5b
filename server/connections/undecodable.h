// Requests of unary calls whose bytes are not a message of the contract.
//
// gRPC answers such calls itself, before the handler runs, with INTERNAL and an empty text, as if
// the server had failed. This changes the answer to INVALID_ARGUMENT with a text and an error
// detail.
//
// Threading: the counter is called from any thread.
#ifndef MLA_SERVER_CONNECTIONS_UNDECODABLE_H_
#define MLA_SERVER_CONNECTIONS_UNDECODABLE_H_

#include <grpcpp/support/server_interceptor.h>

#include <functional>
#include <memory>
#include <vector>

namespace mla::server {

// Called once for each such call.
using UndecodableCounter = std::function<void(const grpc::ServerContextBase& context)>;

// Returns factories for ServerBuilder::experimental().SetInterceptorCreators. Client streams are
// not affected.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
InterceptUndecodable(UndecodableCounter counter);

}  // namespace mla::server

#endif  // MLA_SERVER_CONNECTIONS_UNDECODABLE_H_
