#include "server/grpc/grpc_status.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace mla::server {

v1::ErrorDetail ToErrorDetail(const absl::Status& status) {
  const ErrorDetail from = DetailOf(status);
  v1::ErrorDetail detail;
  detail.set_field(from.field);
  detail.set_limit(from.limit);
  detail.set_got(from.got);
  detail.set_reason(from.reason);
  detail.set_retry_after_ms(static_cast<uint32_t>(
      std::clamp<int64_t>(from.retry_after_ms, 0, std::numeric_limits<uint32_t>::max())));
  detail.set_last_good_position(
      static_cast<uint64_t>(std::max<int64_t>(from.last_good_position, 0)));
  detail.set_peer(from.peer);
  if (from.next_row >= 0) detail.set_next_row(static_cast<uint32_t>(from.next_row));
  if (from.bound_of != BoundOwner::kNone) {
    detail.set_resource(from.resource);
    detail.set_wanted(static_cast<uint64_t>(from.wanted));
    detail.set_free(static_cast<uint64_t>(from.free));
    detail.set_bound(static_cast<uint64_t>(from.bound));
    detail.set_bound_of(from.bound_of == BoundOwner::kTenant ? "tenant" : "server");
  }
  return detail;
}

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase* context,
                          const std::string& trace_id) {
  if (status.ok()) return grpc::Status::OK;
  if (context != nullptr) {
    v1::ErrorDetail detail = ToErrorDetail(status);
    detail.set_trace_id(trace_id);
    context->AddTrailingMetadata(kErrorDetailKey, detail.SerializeAsString());
  }
  // Both enumerations have the same numbers for the canonical codes.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace mla::server
