#include "kernels/cpu/items/row_projection.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/items/row_io.h"
#include "kernels/cpu/items/run_layout.h"
#include "kernels/cpu/items/weights.h"

namespace mla::kernels::cpu {
namespace {

// Depth of a product whose operands are converted: they stay in the L2 cache until they are used. A
// multiple of every level's k_align.
constexpr int32_t kDepth = 512;
constexpr int32_t kOutputPanels = 8;  // panels of a part of hiddens
constexpr float kOnes[] = {1.0f, 1.0f};

int32_t Panels(int32_t columns) { return (columns + kPanel - 1) / kPanel; }

// The weights of one head in packed memory. They form a matrix [columns, depth] whose rows are as
// clients send them.
struct PackedHead {
  int32_t columns = 0, depth = 0;
  int64_t first_k = 0;
  int64_t at = 0, panel_bytes = 0;
  // Place of element (column, k) in the packed memory.
  int64_t Place(const KernelSet& kernels, int32_t column, int32_t k) const {
    return at + column / kPanel * panel_bytes + PanelOffset(kernels, first_k + k, column % kPanel);
  }
};

PackedHead HeadOf(const KernelSet& kernels, const Geometry& geometry, const ProjectedShape& shape,
                  ProjectedPart part, int32_t head) {
  const ProjectedLayout layout = MakeProjectedLayout(kernels, geometry, shape);
  if (part == ProjectedPart::kQueries) {
    return {geometry.expanded_q_dim(), shape.q_lora_rank, 0,
            head * layout.query_panels * layout.query_panel_bytes, layout.query_panel_bytes};
  }
  return {shape.hidden_size, geometry.v_dim, int64_t{head} * geometry.v_dim, layout.outputs_at,
          layout.output_panel_bytes};
}

// A joined row: its record, and its number in that record.
struct RowPlace {
  const RowProjectionRecord* record;
  int64_t row;
};

// Calls visit(i, place) for the joined rows [begin, end), with i from 0 on.
template <typename Visit>
void ForEachRow(std::span<const RowProjectionRecord> records, int64_t begin, int64_t end,
                Visit&& visit) {
  int64_t first = 0;
  for (const RowProjectionRecord& record : records) {
    const int64_t from = std::max(begin, first), to = std::min(end, first + record.rows);
    for (int64_t row = from; row < to; ++row) {
      visit(static_cast<int32_t>(row - begin), RowPlace{&record, row - first});
    }
    first += record.rows;
    if (first >= end) return;
  }
}

// Rotates the pairs of a query's rotated part, in fp32.
void Rotate(RopeLayout layout, const float* rotation, int32_t rope_dim, float* rotated) {
  const int32_t pairs = rope_dim / 2;
  const bool halves = layout == RopeLayout::kHalves;
  for (int32_t pair = 0; pair < pairs; ++pair) {
    float& x = rotated[halves ? pair : 2 * pair];
    float& y = rotated[halves ? pair + pairs : 2 * pair + 1];
    const float old = x, cosine = rotation[pair], sine = rotation[pairs + pair];
    x = old * cosine - y * sine;
    y = old * sine + y * cosine;
  }
}

// Computes C = rows x panels. fp32 rows at bf16 levels are split into two bf16 parts, whose
// products are added.
void Multiply(const RowProjectionContext& context, std::span<const RowProjectionRecord> records,
              int64_t row_begin, int32_t rows, int32_t k, GemmArgs gemm,
              const ProjectionLayout& scratch_layout, std::byte* scratch) {
  const KernelSet& kernels = *context.kernels;
  const DType in = context.projection->in;
  auto** const operands = reinterpret_cast<const void**>(scratch + scratch_layout.row_ptrs);
  const auto size = static_cast<int64_t>(ElementSize(in));
  const bool direct = kernels.bf16_operands == (in == DType::kBf16);
  const bool split = kernels.bf16_operands && !direct;
  const auto* const panels = static_cast<const std::byte*>(gemm.b);
  gemm.a_rows = operands;
  gemm.rows = rows;
  for (int32_t begin = 0; begin < k; begin += gemm.k) {
    gemm.k = direct ? k : std::min(kDepth, k - begin);
    gemm.b = panels + PanelOffset(kernels, begin, 0);
    gemm.accumulate = begin > 0;
    ForEachRow(records, row_begin, row_begin + rows, [&](int32_t i, const RowPlace& place) {
      const std::byte* const sent = static_cast<const std::byte*>(place.record->in) +
                                    (place.row * place.record->in_row_stride + begin) * size;
      std::byte* const row = scratch + scratch_layout.rows + i * scratch_layout.row_bytes;
      std::byte* const low = row + kTileRows * scratch_layout.row_bytes;
      operands[i] = direct ? sent : row;
      operands[rows + i] = low;
      if (split) {
        kernels.split(reinterpret_cast<const float*>(sent), gemm.k,
                      reinterpret_cast<uint16_t*>(row), reinterpret_cast<uint16_t*>(low));
      } else if (!direct) {
        CopyOperands(reinterpret_cast<const Bf16*>(sent), gemm.k, false, row, 0);
      }
    });
    kernels.gemm(gemm);
    if (!split) continue;
    GemmArgs rest = gemm;
    rest.a_rows = operands + rows;
    rest.accumulate = true;
    kernels.gemm(rest);
  }
}

ProjectionLayout ScratchLayout(const KernelSet& kernels, int32_t columns) {
  return MakeProjectionLayout(kernels, kDepth, columns);
}

}  // namespace

ProjectedLayout MakeProjectedLayout(const KernelSet& kernels, const Geometry& geometry,
                                    const ProjectedShape& shape) {
  ProjectedLayout layout;
  layout.query_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, shape.q_lora_rank);
  layout.query_panels = Panels(geometry.expanded_q_dim());
  layout.output_panel_bytes =
      PanelBytes(kernels.bf16_operands, kernels.k_align, geometry.num_heads * geometry.v_dim);
  layout.output_panels = Panels(shape.hidden_size);
  layout.outputs_at = int64_t{geometry.num_heads} * layout.query_panels * layout.query_panel_bytes;
  layout.bytes = layout.outputs_at + layout.output_panels * layout.output_panel_bytes;
  return layout;
}

void PackProjected(const KernelSet& kernels, const Geometry& geometry, const ProjectedShape& shape,
                   ProjectedPart part, int32_t head, const Bf16* weights, std::byte* packed) {
  const PackedHead own = HeadOf(kernels, geometry, shape, part, head);
  for (int32_t n = 0; n < own.columns; ++n) {
    for (int32_t k = 0; k < own.depth; ++k) {
      StoreWeight(kernels, *weights++, packed + own.Place(kernels, n, k));
    }
  }
}

void UnpackProjected(const KernelSet& kernels, const Geometry& geometry,
                     const ProjectedShape& shape, ProjectedPart part, int32_t head,
                     const std::byte* packed, Bf16* weights) {
  const PackedHead own = HeadOf(kernels, geometry, shape, part, head);
  for (int32_t n = 0; n < own.columns; ++n) {
    for (int32_t k = 0; k < own.depth; ++k) {
      *weights++ = ReadWeight(kernels, packed + own.Place(kernels, n, k));
    }
  }
}

int32_t ColumnParts(ProjectedPart part, const Geometry& geometry, const ProjectedShape& shape) {
  if (part == ProjectedPart::kQueries) return geometry.num_heads;
  return (Panels(shape.hidden_size) + kOutputPanels - 1) / kOutputPanels;
}

void ProjectRows(const RowProjectionContext& context, std::span<const RowProjectionRecord> records,
                 const ProjectedWeights& weights, int32_t columns, int64_t row_begin,
                 int64_t row_end, std::byte* scratch) {
  const KernelSet& kernels = *context.kernels;
  const RowProjection& projection = *context.projection;
  const Geometry& g = projection.geometry;
  const ProjectedLayout layout = MakeProjectedLayout(kernels, g, weights.shape);
  const bool queries = context.part == ProjectedPart::kQueries;
  const int32_t first = queries ? columns * g.expanded_q_dim() : columns * kOutputPanels * kPanel;
  const int32_t count = queries
                            ? g.expanded_q_dim()
                            : std::min(kOutputPanels * kPanel, weights.shape.hidden_size - first);
  const ProjectionLayout scratch_layout = ScratchLayout(kernels, count);
  GemmArgs gemm{};
  gemm.panel_bytes = queries ? layout.query_panel_bytes : layout.output_panel_bytes;
  gemm.panels = Panels(count);
  gemm.b = queries ? weights.packed + int64_t{columns} * layout.query_panels * gemm.panel_bytes
                   : weights.packed + layout.outputs_at +
                         int64_t{columns} * kOutputPanels * gemm.panel_bytes;
  gemm.c = reinterpret_cast<float*>(scratch + scratch_layout.c);
  gemm.ldc = scratch_layout.c_ld;
  const auto rows = static_cast<int32_t>(row_end - row_begin);
  const int32_t k = queries ? weights.shape.q_lora_rank : g.num_heads * g.v_dim;
  Multiply(context, records, row_begin, rows, k, gemm, scratch_layout, scratch);
  ForEachRow(records, row_begin, row_end, [&](int32_t i, const RowPlace& place) {
    float* const result = gemm.c + i * gemm.ldc;
    const RowProjectionRecord& record = *place.record;
    if (queries && record.rotations != nullptr) {
      Rotate(projection.rope, record.rotations + place.row * g.rope_dim, g.rope_dim,
             result + g.nope_dim);
    }
    StoreSum(kernels, &result, kOnes, 1, count, projection.out, record.out,
             place.row * record.out_row_stride + first);
  });
}

int64_t RowProjectionScratch(const KernelSet& kernels, const Geometry& most) {
  return ScratchLayout(kernels, std::max(most.expanded_q_dim(), kOutputPanels * kPanel)).bytes;
}

}  // namespace mla::kernels::cpu
