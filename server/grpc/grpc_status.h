// The one place where a status of the engine becomes a status of the wire.
//
// absl::Status carries the canonical code and a message for people; scheduler::Fault beside it
// carries field path, limit, got, reason and retry hint. Unary calls send the Fault serialized as
// mla.v1.ErrorDetail in the trailing metadata key `mla-error-detail-bin`; stream replies carry it
// inside StepError. Pure functions; any thread.
#ifndef MLA_SERVER_GRPC_GRPC_STATUS_H_
#define MLA_SERVER_GRPC_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"
#include "mla/v1/error.pb.h"
#include "scheduler/request.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace mla::server {

inline constexpr char kErrorDetailKey[] = "mla-error-detail-bin";

v1::ErrorDetail ToErrorDetail(const scheduler::Fault& fault);

// Adds the trailer to `context` (may be null: no trailer) unless the status is OK.
grpc::Status ToGrpcStatus(const absl::Status& status, const scheduler::Fault& fault,
                          grpc::ServerContextBase* context);

// "OK", "INVALID_ARGUMENT", ...: stable label values for metrics and logs.
const char* CodeName(absl::StatusCode code);

// INVALID_ARGUMENT that names field, what was got and what would have been accepted; fills `fault`
// with the same words. `reason` is a stable token.
absl::Status InvalidField(scheduler::Fault* fault, std::string field, std::string limit,
                          std::string got, std::string reason = "out_of_range");

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_GRPC_STATUS_H_
