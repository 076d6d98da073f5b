// The oracle's arithmetic: inputs are widened to fp32 (KV rows by their format), sums are
// accumulated in fp64 and rounded once at the end. Each function computes one packed row on its
// own, so results do not depend on what else is in a batch.
//
// Definitions that every backend must share:
//   - a row that sees no key has output 0 and LSE -inf;
//   - LSE is natural-log, of the scaled logits;
//   - a visible NaN or +Inf logit makes its row (output and LSE) NaN; a -Inf logit has weight 0.
#ifndef MLA_KERNELS_REFERENCE_REFERENCE_ATTENTION_H_
#define MLA_KERNELS_REFERENCE_REFERENCE_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "kernels/host_memory/host_backend.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/launch.h"

namespace mla::kernels {

// The weights of a model's heads. For head h, w_uk + h * head_stride is [nope, lora] and w_uv + h *
// head_stride is [lora, v_dim].
struct ReferenceWeights {
  const Bf16* w_uk = nullptr;
  const Bf16* w_uv = nullptr;
  int64_t head_stride = 0;  // elements
};

// Returns element i of a tensor of `dtype`, as fp32.
float LoadElement(const void* base, DType dtype, int64_t index);
void StoreElement(void* base, DType dtype, int64_t index, double value);

// Scratch reused between rows; grows to the largest row seen.
struct ReferenceScratch {
  std::vector<int32_t> positions;
  size_t first_entry = 0;   // index in positions of the first entry
  std::vector<float> rows;  // decoded, one for each of positions
  std::vector<double> query, logits, sum, expanded;
};

// Computes the output rows and LSEs of all heads of query row q_row of one segment. `window` is the
// segment's record, or null.
void ReferenceAttendRow(const AttentionDesc& desc, const SegmentRecord& segment,
                        const WindowRecord* window, const PoolView& pool,
                        const ReferenceWeights& weights, int32_t q_row, ReferenceScratch& scratch);

// Writes the index list of one query row.
void ReferenceSelectRow(const SelectRecord& record, const PoolView& pool, int32_t row);

// One row and head of the absorb product and of the project product.
void ReferenceAbsorbRow(const Geometry& geometry, DType in, DType out,
                        const ProjectionRecord& record, const ReferenceWeights& weights,
                        int32_t row, int32_t head);
void ReferenceProjectRow(const Geometry& geometry, DType in, DType out,
                         const ProjectionRecord& record, const ReferenceWeights& weights,
                         int32_t row, int32_t head);

// Compute one row of Launch::queries and of Launch::hiddens, with all heads. `weights` are those of
// the part, head after head.
void ReferenceQueryRow(const RowProjection& projection, const RowProjectionRecord& record,
                       const ProjectedShape& shape, const Bf16* weights, int32_t row);
void ReferenceHiddenRow(const RowProjection& projection, const RowProjectionRecord& record,
                        const ProjectedShape& shape, const Bf16* weights, int32_t row);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_REFERENCE_REFERENCE_ATTENTION_H_
