#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/item_runner.h"
#include "kernels/cpu/row_io.h"
#include "kernels/cpu/weights.h"

namespace mla::kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Merges the parts of one packed row; `offset` is the row within each part.
void MergeRow(const RunContext& context, std::span<const int32_t> parts, int64_t offset,
              const RequestRecord& request, int64_t o_offset, float* lse_out) {
  const PartialBuffers& partials = context.partials;
  const KernelSet& kernels = *context.kernels;
  float most = -kInfinity;
  for (const int32_t part : parts) most = std::max(most, partials.lse[part + offset]);
  const float shift = most == -kInfinity ? 0.0f : most;
  double total = 0.0;
  for (const int32_t part : parts) {
    total += std::exp(static_cast<double>(partials.lse[part + offset]) - shift);
  }
  // The sum grows in the first part's own row: nobody reads it again.
  const int32_t dim = context.layout.value_dim;
  float* sum = partials.o + (parts[0] + offset) * partials.o_ld;
  for (size_t i = 0; i < parts.size(); ++i) {
    const float lse = partials.lse[parts[i] + offset];
    // A part that saw no key has weight 0.
    const float weight =
        lse == -kInfinity ? 0.0f
                          : static_cast<float>(std::exp(static_cast<double>(lse) - shift) / total);
    if (i == 0) {
      kernels.scale(sum, dim, weight, sum);
    } else if (weight != 0.0f) {
      kernels.add_scaled(partials.o + (parts[i] + offset) * partials.o_ld, dim, weight, sum);
    }
  }
  StoreRow(kernels, sum, dim, 1.0f, context.params->desc.o_dtype, request.o, o_offset);
  if (lse_out != nullptr) {
    *lse_out = total == 0.0 ? -kInfinity : static_cast<float>(shift + std::log(total));
  }
}

}  // namespace

void MergeTile(const RunContext& context, int32_t tile) {
  const AttentionParams& params = *context.params;
  const ReduceTile& final = params.plan.reduce_final_map[static_cast<size_t>(tile)];
  const RequestRecord& request = params.requests[static_cast<size_t>(final.request)];
  const int32_t begin = params.plan.reduce_indptr[static_cast<size_t>(tile)];
  const int32_t end = params.plan.reduce_indptr[static_cast<size_t>(tile) + 1];
  const auto parts = params.plan.reduce_partial_map.subspan(static_cast<size_t>(begin),
                                                            static_cast<size_t>(end - begin));
  int64_t offset = 0;
  for (int64_t q = final.q_begin; q < final.q_end; ++q) {
    for (int64_t head = final.head_begin(); head < final.head_end(); ++head, ++offset) {
      float* lse = request.lse;
      if (lse != nullptr) lse += q * request.lse_row_stride + head * request.lse_head_stride;
      MergeRow(context, parts, offset, request,
               q * request.o_row_stride + head * request.o_head_stride, lse);
    }
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
  const ProjectionLayout at = MakeProjectionLayout(kernels, in_dim, out_dim);
  const int32_t rows = row_end - row_begin;
  auto** operands = reinterpret_cast<const void**>(scratch + at.row_ptrs);
  const auto in_at = [&](int32_t r) {
    return (row_begin + r) * record.in_row_stride + head * record.in_head_stride;
  };

  GemmArgs gemm{};
  const std::byte* of_head = weights.heads + (record.head_offset + head) * layout.head_bytes;
  gemm.b = context.absorb ? of_head : of_head + layout.project_at;
  gemm.panel_bytes = context.absorb ? layout.absorb_panel_bytes : layout.project_panel_bytes;
  gemm.panels = context.absorb ? layout.absorb_panels : layout.project_panels;
  gemm.a_rows = operands;
  gemm.rows = rows;
  gemm.k = in_dim;
  gemm.c = reinterpret_cast<float*>(scratch + at.c);
  gemm.ldc = at.c_ld;
  // fp32 rows at bf16 levels are the sum of two bf16 terms; else one term is exact.
  const bool direct = kernels.bf16_operands == (context.in == DType::kBf16);
  const int32_t terms = kernels.bf16_operands && !direct ? 2 : 1;
  for (int32_t term = 0; term < terms; ++term) {
    for (int32_t r = 0; r < rows; ++r) {
      std::byte* row = scratch + at.rows + r * at.row_bytes;
      operands[r] = row;
      if (direct) {
        operands[r] = static_cast<const std::byte*>(record.in) +
                      in_at(r) * static_cast<int64_t>(ElementSize(context.in));
      } else if (!kernels.bf16_operands) {
        CopyOperands(static_cast<const Bf16*>(record.in) + in_at(r), in_dim, false, row, 0);
      } else {
        for (int32_t i = 0; i < in_dim; ++i) {
          Bf16 parts[2];
          SplitBf16(static_cast<const float*>(record.in)[in_at(r) + i], &parts[0], &parts[1]);
          reinterpret_cast<Bf16*>(row)[i] = parts[term];
        }
      }
    }
    gemm.accumulate = term > 0;
    kernels.gemm(gemm);
  }
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t out = (row_begin + r) * record.out_row_stride + head * record.out_head_stride;
    StoreRow(kernels, gemm.c + r * gemm.ldc, out_dim, 1.0f, context.out, record.out, out);
    if (!context.absorb) continue;
    for (int32_t i = 0; i < g.rope_dim; ++i) {  // the rotated part is copied
      const float value = LoadElement(record.in, context.in, in_at(r) + g.nope_dim + i);
      StoreRow(kernels, &value, 1, 1.0f, context.out, record.out, out + g.kv_lora_rank + i);
    }
  }
}

}  // namespace mla::kernels::cpu
