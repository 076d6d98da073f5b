// Multiplies rows with W_UQ and W_O, and stores these weights as B panels, in the level's operand
// type.
//
//   queries   for each head: k = q_lora_rank, columns = nope_dim + rope_dim
//   hiddens   all heads together: k = heads * v_dim, columns = hidden_size
//
// Rows of different requests that need the same weights are computed together, up to kTileRows at a
// time, so that the weights are read once for them. Threading: as item_runner.h. Nothing allocates.
#ifndef MLA_KERNELS_CPU_ITEMS_ROW_PROJECTION_H_
#define MLA_KERNELS_CPU_ITEMS_ROW_PROJECTION_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/launch.h"

namespace mla::kernels::cpu {

struct ProjectedLayout {
  int64_t query_panel_bytes = 0, output_panel_bytes = 0;
  int32_t query_panels = 0;   // of a head
  int32_t output_panels = 0;  // of all heads
  int64_t outputs_at = 0;
  int64_t bytes = 0;
};

ProjectedLayout MakeProjectedLayout(const KernelSet& kernels, const Geometry& geometry,
                                    const ProjectedShape& shape);

// Packs the weights of one head (AttentionBackend::LoadProjected) into zeroed memory for all heads.
void PackProjected(const KernelSet& kernels, const Geometry& geometry, const ProjectedShape& shape,
                   ProjectedPart part, int32_t head, const Bf16* weights, std::byte* packed);

// Copies the weights of one head back, bit for bit as PackProjected got them.
void UnpackProjected(const KernelSet& kernels, const Geometry& geometry,
                     const ProjectedShape& shape, ProjectedPart part, int32_t head,
                     const std::byte* packed, Bf16* weights);

struct RowProjectionContext {
  const KernelSet* kernels = nullptr;
  const RowProjection* projection = nullptr;
  ProjectedPart part = ProjectedPart::kQueries;
};

// The contents of one weights slot: the shape, and the memory that PackProjected has filled.
struct ProjectedWeights {
  ProjectedShape shape;
  const std::byte* packed = nullptr;
};

// Returns how many parts the columns are computed in: heads of queries, or blocks of hidden
// columns.
int32_t ColumnParts(ProjectedPart part, const Geometry& geometry, const ProjectedShape& shape);

// Computes part `columns` of joined rows [row_begin, row_end), at most kTileRows, of records that
// have the same weights.
void ProjectRows(const RowProjectionContext& context, std::span<const RowProjectionRecord> records,
                 const ProjectedWeights& weights, int32_t columns, int64_t row_begin,
                 int64_t row_end, std::byte* scratch);

// Returns the bytes of `scratch` that any projection within the geometry takes.
int64_t RowProjectionScratch(const KernelSet& kernels, const Geometry& most);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_ROW_PROJECTION_H_
