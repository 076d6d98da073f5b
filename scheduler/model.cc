#include "scheduler/model.h"

#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

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

int64_t ModelSpec::head_weights() const {
  return head_elements() + head_elements(kernels::ProjectedPart::kQueries) +
         head_elements(kernels::ProjectedPart::kOutputs);
}

int64_t ModelSpec::layer_weight_bytes() const {
  const auto padded = [](int64_t row) {
    constexpr int64_t kStep = kernels::ProjectedShape::kRowStep;
    return (row + kStep - 1) / kStep * kStep;
  };
  const kernels::Geometry& g = geometry;
  const int64_t heads = g.num_heads;
  const int64_t elements = heads * g.kv_lora_rank * (int64_t{g.nope_dim} + g.v_dim) +
                           heads * g.expanded_q_dim() * padded(projected.q_lora_rank) +
                           projected.hidden_size * padded(heads * g.v_dim);
  return elements * int64_t{sizeof(kernels::Bf16)};
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
