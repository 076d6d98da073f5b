#include "client/cpp/streams/errors.h"

#include <grpcpp/client_context.h>
#include <unistd.h>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace mla::client {
namespace {

constexpr char kPayloadUrl[] = "type.googleapis.com/mla.v1.ErrorDetail";
constexpr char kDetailKey[] = "mla-error-detail-bin";
// gRPC's message if the reply of a unary call could not be decoded or is missing.
constexpr char kNoReply[] = "No message returned for unary request";

// A server may send any number. An error that claims to be OK must not pass as success.
absl::StatusCode CodeOf(int32_t code) {
  if (code == 0) return absl::StatusCode::kInternal;
  const bool known = code > 0 && code <= static_cast<int32_t>(absl::StatusCode::kUnauthenticated);
  return known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

absl::Status ReplacedError(uint64_t expected_boot_id, uint64_t got_boot_id,
                           const std::string& reason, const std::string& message) {
  v1::ErrorDetail detail;
  detail.set_field("boot_id");
  detail.set_limit(absl::StrFormat("%016x", expected_boot_id));
  detail.set_got(absl::StrFormat("%016x", got_boot_id));
  detail.set_reason(reason);
  return MakeStatus(static_cast<int32_t>(absl::StatusCode::kAborted), message, detail);
}

}  // namespace

std::optional<v1::ErrorDetail> DetailOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  v1::ErrorDetail detail;
  if (!payload || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

absl::Status MakeStatus(int32_t code, const std::string& message, const v1::ErrorDetail& detail) {
  absl::Status status(CodeOf(code), message);
  status.SetPayload(kPayloadUrl, absl::Cord(detail.SerializeAsString()));
  return status;
}

absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context) {
  if (status.ok()) return absl::OkStatus();
  // gRPC gives this the code UNIMPLEMENTED, which would say that the server is too old.
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
      status.error_message() == kNoReply) {
    return absl::InternalError("the server's reply cannot be decoded");
  }
  absl::Status result(CodeOf(status.error_code()), status.error_message());
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto found = trailers.find(kDetailKey); found != trailers.end()) {
    result.SetPayload(kPayloadUrl,
                      absl::Cord(absl::string_view(found->second.data(), found->second.size())));
  }
  return result;
}

absl::Status ForkedError(int64_t pid) {
  v1::ErrorDetail detail;
  detail.set_reason("forked");
  return MakeStatus(static_cast<int32_t>(absl::StatusCode::kFailedPrecondition),
                    absl::StrFormat("the client belongs to process %d, and process %d was forked "
                                    "from it: connect in each process, after the fork",
                                    pid, getpid()),
                    detail);
}

absl::Status RestartedError(uint64_t expected_boot_id, uint64_t got_boot_id) {
  return ReplacedError(expected_boot_id, got_boot_id, "server_restarted",
                       "the server restarted: its sequences are gone");
}

absl::Status AnotherServerError(uint64_t expected_boot_id, uint64_t got_boot_id) {
  return ReplacedError(expected_boot_id, got_boot_id, "another_server",
                       "another server answered on this address, as servers after a balancer do: "
                       "use the server's own address, or a target that names the cluster");
}

absl::Status CheckSame(const char* what, uint64_t got, uint64_t wanted) {
  if (got == wanted) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the server's answer has ", what, " ", got, ", must be ", wanted));
}

}  // namespace mla::client
