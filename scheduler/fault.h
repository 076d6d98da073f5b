// Builds a status and the Fault beside it in one place, so that every refusal names field, limit
// and got.
#ifndef MLA_SCHEDULER_FAULT_H_
#define MLA_SCHEDULER_FAULT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// A refusal of one field. The message reads "attend.layer: got 61, must be 0..60".
inline absl::Status RefuseField(Fault* fault, std::string field, const std::string& got,
                                std::string limit, std::string reason,
                                absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  absl::Status status(code, absl::StrCat(field, ": got ", got, ", must be ", limit));
  fault->field = std::move(field);
  fault->limit = std::move(limit);
  fault->got = got;
  fault->reason = std::move(reason);
  return status;
}

// INVALID_ARGUMENT naming the field unless low <= got <= high.
inline absl::Status CheckRange(Fault* fault, const char* field, int64_t got, int64_t low,
                               int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return RefuseField(fault, field, absl::StrCat(got), absl::StrCat(low, "..", high),
                     "out_of_range");
}

// Names the field to blame, what it held and what would be accepted, beside a status with a text of
// its own.
inline void Blame(Fault* fault, std::string field, std::string got, std::string limit) {
  fault->field = std::move(field);
  fault->got = std::move(got);
  fault->limit = std::move(limit);
}

// A refusal that no single field explains.
inline absl::Status Refuse(Fault* fault, absl::StatusCode code, const std::string& message,
                           std::string reason, int64_t retry_after_ms = 0) {
  fault->reason = std::move(reason);
  fault->retry_after_ms = retry_after_ms;
  return absl::Status(code, message);
}

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_FAULT_H_
