#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/items/item_runner.h"
#include "kernels/cpu/items/row_io.h"
#include "kernels/cpu/items/weights.h"

namespace mla::kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr float kOnes[] = {1.0f, 1.0f};
constexpr int32_t kMergedAtOnce = 64;  // parts of a row

// Merges the parts of one packed row; `offset` is the row within each part. A part that saw no key
// is ignored, whatever it holds. `sink` is the sink of the row's head, or null.
void MergeRow(const RunContext& context, std::span<const int32_t> parts, int64_t offset,
              const SegmentRecord& segment, int64_t o_offset, const float* sink, float* lse_out) {
  const PartialBuffers& partials = context.partials;
  const KernelSet& kernels = *context.kernels;
  const int32_t dim = context.layout.value_dim;
  float most = -kInfinity;
  for (const int32_t part : parts) most = std::max(most, partials.lse[part + offset]);
  const double shift = most == -kInfinity ? 0.0 : most;
  const float* rows[kMergedAtOnce];
  float weights[kMergedAtOnce];
  double total = 0.0;
  int32_t count = 0;
  for (const int32_t part : parts) {
    const float lse = partials.lse[part + offset];
    if (lse == -kInfinity) continue;
    if (count == kMergedAtOnce) {  // the sum so far goes into the first part's row
      float* sum = partials.o + (parts[0] + offset) * partials.o_ld;
      kernels.weighted_sum(rows, weights, count, dim, sum);
      rows[0] = sum;
      weights[0] = 1.0f;
      count = 1;
    }
    const double weight = std::exp(lse - shift);
    total += weight;
    rows[count] = partials.o + (part + offset) * partials.o_ld;
    weights[count++] = static_cast<float>(weight);
  }
  const double lse = count == 0 ? -kInfinity : shift + std::log(total);
  const auto inverse = static_cast<float>((sink == nullptr ? 1.0 : SinkFactor(*sink, lse)) / total);
  for (int32_t i = 0; i < count; ++i) weights[i] *= inverse;
  StoreSum(kernels, rows, weights, count, dim, context.params->desc.o_dtype, segment.o, o_offset);
  if (lse_out != nullptr) *lse_out = static_cast<float>(lse);
}

// Returns `bytes` bytes of the record's input from its byte `begin` on. Bytes in fragments may be
// copied to `spare`.
const void* InputAt(const ProjectionContext& context, const ProjectionRecord& record, int64_t begin,
                    int64_t bytes, void* spare) {
  if (context.fragments != nullptr) return ReadFragments(*context.fragments, begin, bytes, spare);
  return static_cast<const std::byte*>(record.in) + begin;
}

// Sets out[offset ..] to `count` elements of the record's input from its byte `begin` on.
void CopyElements(const ProjectionContext& context, const ProjectionRecord& record, int64_t begin,
                  int32_t count, void* out, int64_t offset) {
  constexpr int32_t kAtOnce = 16;
  const auto size = static_cast<int64_t>(ElementSize(context.in));
  float spare[kAtOnce];
  for (int32_t i = 0; i < count; i += kAtOnce) {
    const int32_t some = std::min(kAtOnce, count - i);
    const void* const sent = InputAt(context, record, begin + i * size, some * size, spare);
    for (int32_t k = 0; k < some; ++k) {
      StoreElement(out, context.out, offset + i + k, LoadElement(sent, context.in, k));
    }
  }
}

}  // namespace

void MergeTile(const RunContext& context, int32_t tile, int32_t part, int32_t parts) {
  const AttentionParams& params = *context.params;
  const ReduceTile& final = params.plan.reduce_final_map[static_cast<size_t>(tile)];
  const SegmentRecord& segment = params.segments[static_cast<size_t>(final.segment)];
  const int32_t begin = params.plan.reduce_indptr[static_cast<size_t>(tile)];
  const int32_t end = params.plan.reduce_indptr[static_cast<size_t>(tile) + 1];
  const auto pieces = params.plan.reduce_partial_map.subspan(static_cast<size_t>(begin),
                                                             static_cast<size_t>(end - begin));
  const float* sinks = nullptr;
  if (params.desc.attention == AttentionKind::kWindow) {
    sinks = params.windows[static_cast<size_t>(final.segment)].sinks;
  }
  const int64_t heads = final.head_end() - final.head_begin();
  const int64_t rows = (final.q_end - final.q_begin) * heads;
  for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
    const int64_t q = final.q_begin + row / heads, head = final.head_begin() + row % heads;
    float* lse = segment.lse;
    if (lse != nullptr) lse += q * segment.lse_row_stride + head * segment.lse_head_stride;
    MergeRow(context, pieces, row, segment, q * segment.o_row_stride + head * segment.o_head_stride,
             sinks == nullptr ? nullptr : sinks + head, lse);
  }
}

void ProjectBlock(const ProjectionContext& context, const ProjectionRecord& record,
                  const PackedWeights& weights, int32_t head, int32_t row_begin, int32_t row_end,
                  std::byte* scratch) {
  const KernelSet& kernels = *context.kernels;
  const Geometry& g = context.geometry;
  const WeightLayout layout = MakeWeightLayout(kernels, g);
  const int32_t in_dim = context.absorb ? g.nope_dim : g.kv_lora_rank;
  const int32_t out_dim = context.absorb ? g.kv_lora_rank : g.v_dim;
  const ProjectionLayout scratch_layout = MakeProjectionLayout(kernels, in_dim, out_dim);
  const int32_t rows = row_end - row_begin;
  auto** operands = reinterpret_cast<const void**>(scratch + scratch_layout.row_ptrs);
  const auto in_size = static_cast<int64_t>(ElementSize(context.in));
  const auto in_at = [&](int32_t r, int32_t first) {
    const int64_t offset =
        (row_begin + r) * record.in_row_stride + head * record.in_head_stride + first;
    return offset * in_size;
  };

  GemmArgs gemm{};
  const std::byte* of_head = weights.heads + (record.head_offset + head) * layout.head_bytes;
  gemm.b = context.absorb ? of_head : of_head + layout.project_at;
  gemm.panel_bytes = context.absorb ? layout.absorb_panel_bytes : layout.project_panel_bytes;
  gemm.panels = context.absorb ? layout.absorb_panels : layout.project_panels;
  gemm.a_rows = operands;
  gemm.rows = rows;
  gemm.k = in_dim;
  gemm.c = reinterpret_cast<float*>(scratch + scratch_layout.c);
  gemm.ldc = scratch_layout.c_ld;
  // At bf16 levels an fp32 row is split into two bf16 parts; in the other cases one part is exact.
  // Low parts are rows of the same product if there is room, so that the weights are read once.
  const bool direct = kernels.bf16_operands == (context.in == DType::kBf16);
  const bool split = kernels.bf16_operands && !direct;
  for (int32_t r = 0; r < rows; ++r) {
    std::byte* row = scratch + scratch_layout.rows + r * scratch_layout.row_bytes;
    std::byte* low = row + kTileRows * scratch_layout.row_bytes;
    operands[r] = row;
    operands[rows + r] = low;
    if (direct) {
      operands[r] = InputAt(context, record, in_at(r, 0), in_dim * in_size, row);
      continue;
    }
    const void* const sent =
        InputAt(context, record, in_at(r, 0), in_dim * in_size, scratch + scratch_layout.query);
    if (split) {
      kernels.split(static_cast<const float*>(sent), in_dim, reinterpret_cast<uint16_t*>(row),
                    reinterpret_cast<uint16_t*>(low));
    } else {
      CopyOperands(static_cast<const Bf16*>(sent), in_dim, false, row, 0);
    }
  }
  const bool stacked = split && 2 * rows <= kTileRows;
  if (stacked) gemm.rows = 2 * rows;
  kernels.gemm(gemm);
  if (split && !stacked) {
    gemm.a_rows = operands + rows;
    gemm.accumulate = true;
    kernels.gemm(gemm);
  }
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t out = (row_begin + r) * record.out_row_stride + head * record.out_head_stride;
    const float* terms[] = {gemm.c + r * gemm.ldc, gemm.c + (rows + r) * gemm.ldc};
    StoreSum(kernels, terms, kOnes, stacked ? 2 : 1, out_dim, context.out, record.out, out);
    if (!context.absorb) continue;
    // The rotated part is copied unchanged.
    CopyElements(context, record, in_at(r, g.nope_dim), g.rope_dim, record.out,
                 out + g.kv_lora_rank);
  }
}

}  // namespace mla::kernels::cpu
