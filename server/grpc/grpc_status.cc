#include "server/grpc/grpc_status.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::server {

v1::ErrorDetail ToErrorDetail(const scheduler::Fault& fault) {
  v1::ErrorDetail detail;
  detail.set_field(fault.field);
  detail.set_limit(fault.limit);
  detail.set_got(fault.got);
  detail.set_reason(fault.reason);
  detail.set_retry_after_ms(static_cast<uint32_t>(
      std::clamp<int64_t>(fault.retry_after_ms, 0, std::numeric_limits<uint32_t>::max())));
  detail.set_last_good_position(
      static_cast<uint64_t>(std::max<int64_t>(fault.last_good_position, 0)));
  if (fault.next_row >= 0) detail.set_next_row(static_cast<uint32_t>(fault.next_row));
  if (fault.bound_of != scheduler::BoundOwner::kNone) {
    detail.set_resource(fault.resource);
    detail.set_wanted(static_cast<uint64_t>(fault.wanted));
    detail.set_free(static_cast<uint64_t>(fault.free));
    detail.set_bound(static_cast<uint64_t>(fault.bound));
    detail.set_bound_of(fault.bound_of == scheduler::BoundOwner::kTenant ? "tenant" : "server");
  }
  return detail;
}

grpc::Status ToGrpcStatus(const absl::Status& status, const scheduler::Fault& fault,
                          grpc::ServerContextBase* context) {
  if (status.ok()) return grpc::Status::OK;
  if (context != nullptr) {
    context->AddTrailingMetadata(kErrorDetailKey, ToErrorDetail(fault).SerializeAsString());
  }
  // Both enumerations hold the canonical codes.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

const char* CodeName(absl::StatusCode code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const int index = static_cast<int>(code);
  return index >= 0 && index < 17 ? kNames[index] : "UNKNOWN";
}

absl::Status InvalidField(scheduler::Fault* fault, std::string field, std::string limit,
                          std::string got, std::string reason) {
  absl::Status status =
      absl::InvalidArgumentError(absl::StrCat(field, ": got ", got, ", must be ", limit));
  fault->field = std::move(field);
  fault->limit = std::move(limit);
  fault->got = std::move(got);
  fault->reason = std::move(reason);
  return status;
}

}  // namespace mla::server
