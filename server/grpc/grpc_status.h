// Converts a status of the engine to a status of the wire; all conversions are here.
//
// An absl::Status carries the canonical code, a message for people and an ErrorDetail
// (base/error.h). Unary calls send the detail as mla.v1.ErrorDetail in the trailing metadata key
// `mla-error-detail-bin`; stream replies carry it inside StepError. Pure functions; any thread.
#ifndef MLA_SERVER_GRPC_GRPC_STATUS_H_
#define MLA_SERVER_GRPC_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"
#include "mla/v1/error.pb.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace mla::server {

inline constexpr char kErrorDetailKey[] = "mla-error-detail-bin";
// The key of initial metadata which says that the header of an UploadWeights call is accepted.
inline constexpr char kAcceptedKey[] = "mla-accepted";

// Returns the detail of `status`, or an empty one.
v1::ErrorDetail ToErrorDetail(const absl::Status& status);

// Adds the trailer to `context` unless the status is OK or `context` is null. `trace_id`: of the
// trace in which the call is recorded, as the detail says it.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase* context,
                          const std::string& trace_id = "");

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_GRPC_STATUS_H_
