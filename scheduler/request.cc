#include "scheduler/request.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/limits.h"

namespace mla::scheduler {

void RequestState::Refuse(Value next) const {
  constexpr const char* kNames[] = {"outside", "admitted", "waiting",
                                    "taken",   "ending",   "answered"};
  std::fprintf(stderr, "engine: a request that is %s cannot be %s\n", kNames[value_], kNames[next]);
  std::abort();
}

absl::Status CheckStepBounds(int64_t sequences, int64_t participants, int64_t lease_ms,
                             const Limits& limits) {
  if (sequences < 1 || sequences > limits.max_step_sequences) {
    return RefuseField("begin_step.sequences", absl::StrCat(sequences),
                       absl::StrCat("1..", limits.max_step_sequences, " entries"));
  }
  if (participants < 1 || participants > limits.max_participants) {
    return RefuseField("begin_step.participants", absl::StrCat(participants),
                       absl::StrCat("0..", limits.max_participants));
  }
  return CheckRange("begin_step.lease_ms", lease_ms, 0, limits.longest_step_lease_ms());
}

absl::Status CheckStepRows(int64_t rows, const Limits& limits) {
  if (rows <= limits.max_step_rows) return absl::OkStatus();
  return RefuseField("begin_step.sequences", absl::StrCat(rows),
                     absl::StrCat("at most ", limits.max_step_rows, " rows together"));
}

}  // namespace mla::scheduler
