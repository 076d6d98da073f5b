#include "kernels/cpu/weights.h"

#include <cstring>

namespace mla::kernels::cpu {
namespace {

int32_t Panels(int32_t columns) { return (columns + kPanel - 1) / kPanel; }

// Address of element (k, n) of B panels.
std::byte* Element(const KernelSet& kernels, std::byte* panels, int64_t panel_bytes, int32_t k,
                   int32_t n) {
  std::byte* panel = panels + n / kPanel * panel_bytes;
  if (!kernels.bf16_operands) return panel + (k * kPanel + n % kPanel) * 4;
  return panel + ((k / 2 * kPanel + n % kPanel) * 2 + k % 2) * 2;
}

// B panels from a row-major [k, columns] matrix.
void PackMatrix(const KernelSet& kernels, const Bf16* matrix, int32_t k, int32_t columns,
                std::byte* panels, int64_t panel_bytes) {
  for (int32_t i = 0; i < k; ++i) {
    for (int32_t n = 0; n < columns; ++n) {
      const Bf16 value = matrix[static_cast<int64_t>(i) * columns + n];
      std::byte* to = Element(kernels, panels, panel_bytes, i, n);
      if (kernels.bf16_operands) {
        std::memcpy(to, &value, sizeof value);
      } else {
        const float wide = ToFloat(value);
        std::memcpy(to, &wide, sizeof wide);
      }
    }
  }
}

// The transposition for even dims: 2 x 2 blocks of (n, k), each one dword of the source and of the
// result twice.
void TransposePairs(const Geometry& geometry, const std::byte* head, int64_t source_panel_bytes,
                    int64_t panel_bytes, std::byte* out) {
  for (int32_t n = 0; n < geometry.nope_dim; n += 2) {
    std::byte* column = out + n / kPanel * panel_bytes + n % kPanel * 4;
    for (int32_t k = 0; k < geometry.kv_lora_rank; k += 2) {
      const std::byte* from =
          head + k / kPanel * source_panel_bytes + (n / 2 * kPanel + k % kPanel) * 4;
      uint32_t even, odd;  // (n, n + 1) at k and at k + 1
      std::memcpy(&even, from, 4);
      std::memcpy(&odd, from + 4, 4);
      const uint64_t both = (uint64_t{even >> 16} << 32 | uint64_t{odd >> 16} << 48) |
                            (uint64_t{even & 0xffffu} | uint64_t{odd & 0xffffu} << 16);
      std::memcpy(column + k / 2 * kPanel * 4, &both, 8);
    }
  }
}

}  // namespace

WeightLayout MakeWeightLayout(const KernelSet& kernels, const Geometry& geometry) {
  WeightLayout at;
  at.absorb_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, geometry.nope_dim);
  at.absorb_panels = Panels(geometry.kv_lora_rank);
  at.project_panel_bytes =
      PanelBytes(kernels.bf16_operands, kernels.k_align, geometry.kv_lora_rank);
  at.project_panels = Panels(geometry.v_dim);
  at.project_at = at.absorb_panel_bytes * at.absorb_panels;
  at.head_bytes = at.project_at + at.project_panel_bytes * at.project_panels;
  return at;
}

void PackWeights(const KernelSet& kernels, const Geometry& geometry, int32_t heads,
                 const Bf16* w_uk, const Bf16* w_uv, std::byte* packed) {
  const WeightLayout at = MakeWeightLayout(kernels, geometry);
  const int64_t uk = static_cast<int64_t>(geometry.nope_dim) * geometry.kv_lora_rank;
  const int64_t uv = static_cast<int64_t>(geometry.v_dim) * geometry.kv_lora_rank;
  for (int32_t head = 0; head < heads; ++head, packed += at.head_bytes) {
    PackMatrix(kernels, w_uk + head * uk, geometry.nope_dim, geometry.kv_lora_rank, packed,
               at.absorb_panel_bytes);
    PackMatrix(kernels, w_uv + head * uv, geometry.kv_lora_rank, geometry.v_dim,
               packed + at.project_at, at.project_panel_bytes);
  }
}

void TransposeUk(const KernelSet& kernels, const Geometry& geometry, const std::byte* head,
                 int64_t panel_bytes, std::byte* out) {
  const WeightLayout at = MakeWeightLayout(kernels, geometry);
  const int32_t panels = Panels(geometry.nope_dim);
  std::memset(out, 0, static_cast<size_t>(panels * panel_bytes));
  if (kernels.bf16_operands && geometry.nope_dim % 2 == 0 && geometry.kv_lora_rank % 2 == 0) {
    TransposePairs(geometry, head, at.absorb_panel_bytes, panel_bytes, out);
    return;
  }
  auto* source = const_cast<std::byte*>(head);
  const size_t size = kernels.bf16_operands ? 2 : 4;
  for (int32_t n = 0; n < geometry.nope_dim; ++n) {
    for (int32_t k = 0; k < geometry.kv_lora_rank; ++k) {
      std::memcpy(Element(kernels, out, panel_bytes, k, n),
                  Element(kernels, source, at.absorb_panel_bytes, n, k), size);
    }
  }
}

}  // namespace mla::kernels::cpu
