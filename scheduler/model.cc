#include "scheduler/model.h"

#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/error.h"
#include "kernels/projected_weights.h"

namespace mla::scheduler {

int32_t ModelSpec::q_dim(Profile profile) const {
  switch (profile) {
    case Profile::kAbsorbed:
      return geometry.absorbed_q_dim();
    case Profile::kExpanded:
    case Profile::kProjected:
      return geometry.expanded_q_dim();
    case Profile::kAppendOnly:
      return 0;
  }
  return 0;
}

int32_t ModelSpec::o_dim(Profile profile) const {
  switch (profile) {
    case Profile::kAbsorbed:
      return windowed() ? geometry.kv_row_dim() : geometry.kv_lora_rank;
    case Profile::kExpanded:
    case Profile::kProjected:
      return geometry.v_dim;
    case Profile::kAppendOnly:
      return 0;
  }
  return 0;
}

absl::Status ModelSpec::CheckAttend(const AttendRange& range, Profile profile,
                                    int32_t total_rows) const {
  const int32_t heads = geometry.num_heads;
  const struct {
    const char* field;
    int64_t got, low, high;
  } bounds[] = {
      {"attend.layer", range.layer, 0, layers - 1},
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

absl::Status ModelSpec::CheckProfile(Profile profile, bool has_kv) const {
  if (profile == Profile::kAppendOnly && !has_kv) {
    return RefuseField("attend.has_kv", "false", "true with PROFILE_APPEND_ONLY", "nothing_to_do");
  }
  const bool is_projected = profile == Profile::kProjected;
  const bool computes = profile != Profile::kAppendOnly;
  if (computes && is_projected != projected.present()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        is_projected
            ? "attend.profile: the model was registered without q_lora_rank and hidden_size"
            : "attend.profile: the server rotates the queries of the model (rope_owner), so "
              "it must make them",
        {.field = "attend.profile",
         .got = is_projected ? "PROFILE_PROJECTED" : "queries",
         .limit = is_projected ? "another profile for this model"
                               : "PROFILE_PROJECTED or PROFILE_APPEND_ONLY for this model",
         .reason = is_projected ? "no_projected_profile" : "queries_projected"});
  }
  if (profile == Profile::kExpanded && !has_expanded()) {
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

int64_t ModelSpec::head_weights() const {
  return head_elements() + head_elements(kernels::ProjectedPart::kQueries) +
         head_elements(kernels::ProjectedPart::kOutputs);
}

int64_t ModelSpec::layer_weight_bytes() const {
  return geometry.num_heads * head_elements() * int64_t{sizeof(kernels::Bf16)} +
         kernels::ProjectedBytes(geometry, projected);
}

int64_t ModelSpec::head_bytes(kernels::ProjectedPart part, int32_t head) const {
  return kernels::WindowOf(geometry, projected, part, head, 1).Bytes(projected.weights);
}

std::string ModelSpec::ContentsText() const {
  const kernels::Geometry& g = geometry;
  const int64_t numbers[] = {
      g.num_heads,
      g.kv_lora_rank,
      g.rope_dim,
      g.nope_dim,
      g.v_dim,
      layers,
      page_size,
      std::bit_cast<int64_t>(softmax_scale),
      static_cast<int64_t>(query_precision),
      static_cast<int64_t>(kv_format),
      static_cast<int64_t>(attention),
      top_k,
      indexer.heads,
      indexer.dim,
      static_cast<int64_t>(fp8_compute),
      window,
      tail_bytes,
      static_cast<int64_t>(entry_format),
  };
  // Written last, so that the texts of other models stay equal to those in older checkpoints.
  return absl::StrCat(absl::StrJoin(numbers, "/"), "/", absl::StrJoin(ratios, ","), "/",
                      weights_digest, needs_sinks ? "/sinks" : "",
                      projected.present()
                          ? absl::StrCat("/projected,", projected.q_lora_rank, ",",
                                         projected.hidden_size, ",", static_cast<int>(rope))
                          : "");
}

}  // namespace mla::scheduler
