// Defines the one value for an error: an absl::Status that carries an ErrorDetail as its payload.
//
// Code and message are for any caller. The detail names the field, its value, the accepted values,
// and the actions that a client may take. It is written and read here alone; the server sends it as
// mla.v1.ErrorDetail (server/grpc/grpc_status.h). Pure functions, any thread. An OK status does not
// have a detail, so success allocates nothing.
#ifndef MLA_BASE_ERROR_H_
#define MLA_BASE_ERROR_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace mla {

// Says whose bound refused a request.
enum class BoundOwner : uint8_t { kNone, kTenant, kServer };

// Describes a fault in terms of the contract.
struct ErrorDetail {
  std::string field = {};   // path, e.g. "attend.row_count"
  std::string got = {};     // value of the field
  std::string limit = {};   // accepted values
  std::string reason = {};  // stable token, e.g. "epoch_mismatch"
  int64_t retry_after_ms = 0;
  int64_t last_good_position = 0;
  // For an Attend with KV rows whose step is still open: the first row of the step that its layer
  // does not have. The rows before it are stored, or on their way; the client sends again from it.
  // -1: the failure does not tell.
  int64_t next_row = -1;
  // For a refusal by a bound: the resource, the wanted amount, the free amount, and the owner of
  // the bound.
  std::string resource = {};
  int64_t wanted = 0;
  int64_t free = 0;
  int64_t bound = 0;
  BoundOwner bound_of = BoundOwner::kNone;
  std::string peer = {};  // HOST:PORT of the server to go to

  friend bool operator==(const ErrorDetail&, const ErrorDetail&) = default;
};

// REQUIRES: code is not OK.
absl::Status MakeError(absl::StatusCode code, absl::string_view message, const ErrorDetail& detail);

// Returns the detail of `status`, or one without any field set.
ErrorDetail DetailOf(const absl::Status& status);

// `status` with the detail that change(detail) makes of its own. REQUIRES: an error.
template <typename Change>
absl::Status AmendDetail(const absl::Status& status, Change&& change) {
  ErrorDetail detail = DetailOf(status);
  std::forward<Change>(change)(detail);
  return MakeError(status.code(), status.message(), detail);
}

// Returns a refusal of detail.field. The message reads "attend.layer: got 61, must be 0..60".
absl::Status RefuseField(const ErrorDetail& detail,
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument);
absl::Status RefuseField(std::string field, std::string got, std::string limit,
                         std::string reason = "out_of_range",
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument);

absl::Status RefuseRange(absl::string_view field, std::string got, int64_t low, int64_t high);

// Returns OK if low <= got <= high, for any kind of integer; otherwise INVALID_ARGUMENT, which
// names the field. `field` is a text, or a function that makes one: it is called only for a
// refusal.
template <typename Field, typename Integer>
absl::Status CheckRange(const Field& field, Integer got, int64_t low, int64_t high) {
  if (std::cmp_greater_equal(got, low) && std::cmp_less_equal(got, high)) [[likely]] {
    return absl::OkStatus();
  }
  if constexpr (std::is_invocable_v<Field>) {
    return RefuseRange(field(), absl::StrCat(got), low, high);
  } else {
    return RefuseRange(field, absl::StrCat(got), low, high);
  }
}

}  // namespace mla

#endif  // MLA_BASE_ERROR_H_
