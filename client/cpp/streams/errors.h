// Makes the statuses of the client library: canonical codes, with the server's ErrorDetail
// attached.
//
// Retry only where the detail says so (retry_after_ms > 0). ABORTED with reason "server_restarted"
// means that the server lost its state: sequences are gone and must be filled again.
#ifndef MLA_CLIENT_CPP_STREAMS_ERRORS_H_
#define MLA_CLIENT_CPP_STREAMS_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "mla/v1/error.pb.h"

namespace grpc {
class ClientContext;
class Status;
}  // namespace grpc

namespace mla::client {

// Returns the detail that the server sent with a failure, or nullopt.
std::optional<v1::ErrorDetail> DetailOf(const absl::Status& status);

absl::Status MakeStatus(int32_t code, const std::string& message, const v1::ErrorDetail& detail);

// Returns the status of a finished unary call, with the detail from the trailing metadata of
// `context`.
absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context);

// Returns FAILED_PRECONDITION / "forked": a copy of an object of process `pid` was used in another
// one.
absl::Status ForkedError(int64_t pid);

// Returns ABORTED / "server_restarted".
absl::Status RestartedError(uint64_t expected_boot_id, uint64_t got_boot_id);

// Returns ABORTED / "another_server".
absl::Status AnotherServerError(uint64_t expected_boot_id, uint64_t got_boot_id);

// Returns DATA_LOSS unless an answer is about the requested object.
absl::Status CheckSame(const char* what, uint64_t got, uint64_t wanted);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_ERRORS_H_
