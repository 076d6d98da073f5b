// Checks of numbers that validators of messages share. Each refusal names the field, the range and
// the value. Part of the validators, not for others.
#ifndef MLA_SERVER_GRPC_FIELD_CHECKS_H_
#define MLA_SERVER_GRPC_FIELD_CHECKS_H_

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::server {

inline std::string Range(int64_t low, int64_t high) { return absl::StrCat(low, "..", high); }

// Checks low <= value <= high before the value is narrowed.
inline absl::Status Narrow(uint64_t value, int64_t low, int64_t high, const char* field,
                           int32_t* out) {
  absl::Status status = CheckRange(field, value, low, high);
  if (status.ok()) *out = static_cast<int32_t>(value);
  return status;
}

inline absl::Status Narrow64(uint64_t value, const char* field, int64_t* out) {
  absl::Status status = CheckRange(field, value, 0, std::numeric_limits<int64_t>::max());
  if (status.ok()) *out = static_cast<int64_t>(value);
  return status;
}

inline absl::Status CheckLease(uint32_t lease_ms, int64_t longest_ms, const char* field,
                               int64_t* out) {
  absl::Status status = CheckRange(field, lease_ms, 0, longest_ms);
  if (status.ok()) *out = lease_ms;
  return status;
}

inline absl::Status CheckCount(const char* field, int64_t got, int64_t most) {
  if (got <= most) return absl::OkStatus();
  return RefuseField(field, absl::StrCat(got, " entries"), absl::StrCat("at most ", most),
                     "out_of_range");
}

// Checks first < total and first + count <= total, in 64 bits. REQUIRES: total >= 1.
inline absl::Status CheckSlice(uint64_t first, uint64_t count, int64_t min_count, int64_t total,
                               const char* first_field, const char* count_field) {
  MLA_RETURN_IF_ERROR(CheckRange(first_field, first, 0, total - 1));
  return CheckRange(count_field, count, min_count, total - static_cast<int64_t>(first));
}

// Computes rows x heads x dim x element_size; returns false on overflow.
inline bool Product(int64_t a, int64_t b, int64_t c, int64_t d, int64_t* out) {
  return !__builtin_mul_overflow(a, b, out) && !__builtin_mul_overflow(*out, c, out) &&
         !__builtin_mul_overflow(*out, d, out);
}

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_FIELD_CHECKS_H_
