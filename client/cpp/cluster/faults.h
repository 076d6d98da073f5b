// Makes the errors of the cluster's client itself, with their reasons (docs/errors.md).
#ifndef MLA_CLIENT_CPP_CLUSTER_FAULTS_H_
#define MLA_CLIENT_CPP_CLUSTER_FAULTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"

namespace mla::client {

inline constexpr char kRegistryAway[] = "registry_away";
inline constexpr char kNoServers[] = "no_servers";
inline constexpr char kOwnersFailed[] = "owners_failed";
// A server's: its detail names the server that has the sequence now.
inline constexpr char kMoved[] = "moved";

// Returns INVALID_ARGUMENT: "FIELD: got GOT, must be LIMIT".
inline absl::Status RefuseValue(const std::string& field, const std::string& got,
                                const std::string& limit) {
  v1::ErrorDetail detail;
  detail.set_field(field);
  detail.set_got(got);
  detail.set_limit(limit);
  return MakeStatus(static_cast<int32_t>(absl::StatusCode::kInvalidArgument),
                    absl::StrCat(field, ": got ", got, ", must be ", limit), detail);
}

inline absl::Status WithReason(absl::StatusCode code, const std::string& message,
                               const std::string& reason) {
  v1::ErrorDetail detail;
  detail.set_reason(reason);
  return MakeStatus(static_cast<int32_t>(code), message, detail);
}

// Returns the reason in the detail of a status; empty without one.
inline std::string ReasonOf(const absl::Status& status) {
  const auto detail = DetailOf(status);
  return detail ? detail->reason() : "";
}

// Returns true for an error after which another server may do better: this one does not answer.
inline bool IsAway(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// Returns true for an error that says that another process answers than before.
inline bool IsReplaced(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason == "server_restarted" || reason == "another_server";
}

// An error without a detail is the transport's own: the stream is of no use any more.
inline bool BreaksSession(const absl::Status& status) { return !status.ok() && !DetailOf(status); }

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_FAULTS_H_
