#include "kernels/cpu/items/weights.h"

#include <algorithm>
#include <cstring>

namespace mla::kernels::cpu {
namespace {

int32_t Panels(int32_t columns) { return (columns + kPanel - 1) / kPanel; }

// Address of element (k, n) of B panels.
template <typename Byte>
Byte* Element(const KernelSet& kernels, Byte* panels, int64_t panel_bytes, int32_t k, int32_t n) {
  return panels + n / kPanel * panel_bytes + PanelOffset(kernels, k, n % kPanel);
}

// Addresses of the groups of a matrix in B panels: the elements of G rows in one column, which lie
// together. Offsets of rows and of columns add up, so that one of each is enough.
class Groups {
 public:
  Groups(const KernelSet& kernels, int64_t panel_bytes)
      : kernels_(kernels), panel_bytes_(panel_bytes) {
    for (int32_t n = 0; n < kPanel; ++n) columns_[n] = PanelOffset(kernels, 0, n);
  }
  // Calls visit(column, offset) for the group of each column in the rows from `k` on.
  template <typename Visit>
  void ForColumns(int32_t k, int32_t columns, const Visit& visit) const {
    int64_t panel = PanelOffset(kernels_, k, 0);
    for (int32_t first = 0; first < columns; first += kPanel, panel += panel_bytes_) {
      const int32_t end = std::min(columns - first, kPanel);
      for (int32_t n = 0; n < end; ++n) visit(first + n, panel + columns_[n]);
    }
  }

 private:
  const KernelSet& kernels_;
  const int64_t panel_bytes_;
  int64_t columns_[kPanel];
};

// Pack and unpack the rows [0, k) of a row-major matrix, G at a time; k is a multiple of G, which
// is the k_group of bf16 operands.
template <int G>
void PackGroups(const Groups& groups, const Bf16* matrix, int32_t k, int32_t columns,
                std::byte* panels) {
  for (int32_t i = 0; i < k; i += G, matrix += int64_t{G} * columns) {
    groups.ForColumns(i, columns, [&](int32_t n, int64_t offset) {
      for (int32_t j = 0; j < G; ++j) {
        std::memcpy(panels + offset + j * int64_t{sizeof(Bf16)}, matrix + int64_t{j} * columns + n,
                    sizeof(Bf16));
      }
    });
  }
}
template <int G>
void UnpackGroups(const Groups& groups, const std::byte* panels, int32_t k, int32_t columns,
                  Bf16* matrix) {
  for (int32_t i = 0; i < k; i += G, matrix += int64_t{G} * columns) {
    groups.ForColumns(i, columns, [&](int32_t n, int64_t offset) {
      for (int32_t j = 0; j < G; ++j) {
        std::memcpy(matrix + int64_t{j} * columns + n, panels + offset + j * int64_t{sizeof(Bf16)},
                    sizeof(Bf16));
      }
    });
  }
}

// Returns the number of rows that go in groups; the others go one by one.
int32_t GroupedRows(const KernelSet& kernels, int32_t k) {
  return kernels.bf16_operands ? k - k % kernels.k_group : 0;
}

// Packs a row-major [k, columns] matrix into B panels. The engine waits for it.
void PackMatrix(const KernelSet& kernels, const Bf16* matrix, int32_t k, int32_t columns,
                std::byte* panels, int64_t panel_bytes) {
  const int32_t grouped = GroupedRows(kernels, k);
  const Groups groups(kernels, panel_bytes);
  (kernels.k_group == 2 ? PackGroups<2> : PackGroups<8>)(groups, matrix, grouped, columns, panels);
  for (int32_t i = grouped; i < k; ++i) {
    for (int32_t n = 0; n < columns; ++n) {
      StoreWeight(kernels, matrix[static_cast<int64_t>(i) * columns + n],
                  Element(kernels, panels, panel_bytes, i, n));
    }
  }
}

// The inverse of PackMatrix.
void UnpackMatrix(const KernelSet& kernels, const std::byte* panels, int64_t panel_bytes, int32_t k,
                  int32_t columns, Bf16* matrix) {
  const int32_t grouped = GroupedRows(kernels, k);
  const Groups groups(kernels, panel_bytes);
  (kernels.k_group == 2 ? UnpackGroups<2> : UnpackGroups<8>)(groups, panels, grouped, columns,
                                                             matrix);
  for (int32_t i = grouped; i < k; ++i) {
    for (int32_t n = 0; n < columns; ++n) {
      matrix[static_cast<int64_t>(i) * columns + n] =
          ReadWeight(kernels, Element(kernels, panels, panel_bytes, i, n));
    }
  }
}

// Transposes for dims that are multiples of G, which is 2 or 8. It works on blocks of G x G
// elements, whose columns are contiguous in the source and whose rows are in the result.
template <int G>
void TransposeGroups(const KernelSet& kernels, const Geometry& geometry, const std::byte* head,
                     int64_t source_panel_bytes, int64_t panel_bytes, std::byte* out) {
  for (int32_t n = 0; n < geometry.nope_dim; n += G) {
    for (int32_t k = 0; k < geometry.kv_lora_rank; k += G) {
      Bf16 block[G][G];  // [k][n]
      for (int32_t i = 0; i < G; ++i) {
        std::memcpy(block[i],
                    head + (k + i) / kPanel * source_panel_bytes +
                        PanelOffset(kernels, n, (k + i) % kPanel),
                    sizeof block[i]);
      }
      for (int32_t j = 0; j < G; ++j) {
        Bf16 column[G];
        for (int32_t i = 0; i < G; ++i) column[i] = block[i][j];
        std::memcpy(
            out + (n + j) / kPanel * panel_bytes + PanelOffset(kernels, k, (n + j) % kPanel),
            column, sizeof column);
      }
    }
  }
}

}  // namespace

WeightLayout MakeWeightLayout(const KernelSet& kernels, const Geometry& geometry) {
  WeightLayout layout;
  layout.absorb_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, geometry.nope_dim);
  layout.absorb_panels = Panels(geometry.kv_lora_rank);
  layout.project_panel_bytes =
      PanelBytes(kernels.bf16_operands, kernels.k_align, geometry.kv_lora_rank);
  layout.project_panels = Panels(geometry.v_dim);
  layout.project_at = layout.absorb_panel_bytes * layout.absorb_panels;
  layout.head_bytes = layout.project_at + layout.project_panel_bytes * layout.project_panels;
  return layout;
}

void PackWeights(const KernelSet& kernels, const Geometry& geometry, int32_t heads,
                 const Bf16* w_uk, const Bf16* w_uv, std::byte* packed) {
  const WeightLayout layout = MakeWeightLayout(kernels, geometry);
  const int64_t uk = static_cast<int64_t>(geometry.nope_dim) * geometry.kv_lora_rank;
  const int64_t uv = static_cast<int64_t>(geometry.v_dim) * geometry.kv_lora_rank;
  for (int32_t head = 0; head < heads; ++head, packed += layout.head_bytes) {
    PackMatrix(kernels, w_uk + head * uk, geometry.nope_dim, geometry.kv_lora_rank, packed,
               layout.absorb_panel_bytes);
    PackMatrix(kernels, w_uv + head * uv, geometry.kv_lora_rank, geometry.v_dim,
               packed + layout.project_at, layout.project_panel_bytes);
  }
}

void UnpackWeights(const KernelSet& kernels, const Geometry& geometry, const std::byte* packed,
                   Bf16* w_uk, Bf16* w_uv) {
  const WeightLayout layout = MakeWeightLayout(kernels, geometry);
  UnpackMatrix(kernels, packed, layout.absorb_panel_bytes, geometry.nope_dim, geometry.kv_lora_rank,
               w_uk);
  UnpackMatrix(kernels, packed + layout.project_at, layout.project_panel_bytes,
               geometry.kv_lora_rank, geometry.v_dim, w_uv);
}

void TransposeUk(const KernelSet& kernels, const Geometry& geometry, const std::byte* head,
                 int64_t panel_bytes, std::byte* out) {
  const WeightLayout layout = MakeWeightLayout(kernels, geometry);
  const int32_t panels = Panels(geometry.nope_dim);
  std::memset(out, 0, static_cast<size_t>(panels * panel_bytes));
  const bool whole =
      geometry.nope_dim % kernels.k_group == 0 && geometry.kv_lora_rank % kernels.k_group == 0;
  if (whole && kernels.k_group > 1) {
    (kernels.k_group == 2 ? TransposeGroups<2> : TransposeGroups<8>)(kernels, geometry, head,
                                                                     layout.absorb_panel_bytes,
                                                                     panel_bytes, out);
    return;
  }
  const size_t size = kernels.bf16_operands ? 2 : 4;
  for (int32_t n = 0; n < geometry.nope_dim; ++n) {
    for (int32_t k = 0; k < geometry.kv_lora_rank; ++k) {
      std::memcpy(Element(kernels, out, panel_bytes, k, n),
                  Element(kernels, head, layout.absorb_panel_bytes, n, k), size);
    }
  }
}

}  // namespace mla::kernels::cpu
