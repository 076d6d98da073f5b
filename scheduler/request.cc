#include "scheduler/request.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/limits.h"
#include "scheduler/model.h"

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

absl::Status CheckAttendRange(const AttendRange& range, Profile profile, const ModelSpec& model,
                              int32_t total_rows) {
  const int32_t heads = model.geometry.num_heads;
  const struct {
    const char* field;
    int64_t got, low, high;
  } bounds[] = {
      {"attend.layer", range.layer, 0, model.layers - 1},
      {"attend.row_begin", range.row_begin, 0, total_rows - 1},
      {"attend.row_count", range.row_count, 1, total_rows - range.row_begin},
      {"attend.head_offset", range.head_offset, 0, heads - 1},
      {"attend.num_heads", range.num_heads, profile == Profile::kAppendOnly ? 0 : 1,
       heads - range.head_offset},
  };
  for (const auto& [field, got, low, high] : bounds) {
    if (got < low || got > high) return RefuseRange(field, absl::StrCat(got), low, high);
  }
  if (profile == Profile::kProjected && range.num_heads != heads) {
    return RefuseField("attend.num_heads", absl::StrCat(range.num_heads),
                       absl::StrCat(heads, ": PROFILE_PROJECTED has all heads"));
  }
  return absl::OkStatus();
}

absl::Status CheckAttendProfile(Profile profile, bool has_kv, const ModelSpec& model) {
  if (profile == Profile::kAppendOnly && !has_kv) {
    return RefuseField("attend.has_kv", "false", "true with PROFILE_APPEND_ONLY", "nothing_to_do");
  }
  const bool projected = profile == Profile::kProjected;
  const bool computes = profile != Profile::kAppendOnly;
  if (computes && projected != model.projected.present()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        projected ? "attend.profile: the model was registered without q_lora_rank and hidden_size"
                  : "attend.profile: the server rotates the queries of the model (rope_owner), so "
                    "it must make them",
        {.field = "attend.profile",
         .got = projected ? "PROFILE_PROJECTED" : "queries",
         .limit = projected ? "another profile for this model"
                            : "PROFILE_PROJECTED or PROFILE_APPEND_ONLY for this model",
         .reason = projected ? "no_projected_profile" : "queries_projected"});
  }
  if (profile == Profile::kExpanded &&
      (model.geometry.nope_dim == 0 || model.geometry.v_dim == 0)) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        "attend.profile: the model was registered without nope_dim and v_dim, so it has no "
        "EXPANDED form",
        {.field = "attend.profile",
         .got = "PROFILE_EXPANDED",
         .limit = "PROFILE_ABSORBED or PROFILE_APPEND_ONLY for this model",
         .reason = "no_expanded_profile"});
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
