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
// together. Offsets of rows and of columns add up.
class Groups {
 public:
  Groups(const KernelSet& kernels, int64_t panel_bytes)
      : kernels_(kernels), panel_bytes_(panel_bytes) {}
  // Calls visit(column, offset) for the first column of each full panel in the rows from `k` on.
  template <typename Visit>
  void ForPanels(int32_t k, int32_t columns, const Visit& visit) const {
    int64_t panel = PanelOffset(kernels_, k, 0);
    for (int32_t n = 0; n + kPanel <= columns; n += kPanel, panel += panel_bytes_) visit(n, panel);
  }
  // Calls visit(column, offset) for the group of each column in the panel that is not full.
  template <typename Visit>
  void ForLastColumns(int32_t k, int32_t columns, const Visit& visit) const {
    for (int32_t n = columns - columns % kPanel; n < columns; ++n) {
      visit(n, n / kPanel * panel_bytes_ + PanelOffset(kernels_, k, n % kPanel));
    }
  }

 private:
  const KernelSet& kernels_;
  const int64_t panel_bytes_;
};

// Eight elements, as bits.
using Eight = uint16_t __attribute__((vector_size(16)));

Eight LoadEight(const void* from) {
  Eight eight;
  std::memcpy(&eight, from, sizeof eight);
  return eight;
}
void StoreEight(const Eight& eight, void* to) { std::memcpy(to, &eight, sizeof eight); }

// Return elements of `a` and `b` in turn: of their first halves, and of their second halves.
Eight FirstInTurn(const Eight& a, const Eight& b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
Eight SecondInTurn(const Eight& a, const Eight& b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Transposes 8 x 8 elements. Interleaving rows i and i + 4 rotates the six bits of an element's
// place (row, column) by one, so three rounds exchange row and column.
void Transpose(Eight (&rows)[8]) {
  for (int round = 0; round < 3; ++round) {
    Eight next[8];
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = FirstInTurn(rows[i], rows[i + 4]);
      next[2 * i + 1] = SecondInTurn(rows[i], rows[i + 4]);
    }
    std::memcpy(&rows, &next, sizeof rows);
  }
}

// Pack and unpack G rows of a panel's columns. In the matrix a row begins `columns` elements after
// the row before. The group of each column begins at `panel` + PanelOffset.
template <int G>
void PackPanel(const Bf16* matrix, int64_t columns, std::byte* panel) {
  for (int32_t n = 0; n < kPanel; n += 8, matrix += 8) {
    if constexpr (G == 2) {
      const Eight first = LoadEight(matrix), second = LoadEight(matrix + columns);
      StoreEight(FirstInTurn(first, second), panel + n * 4);
      StoreEight(SecondInTurn(first, second), panel + n * 4 + 16);
    } else {
      Eight rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = LoadEight(matrix + i * columns);
      Transpose(rows);
      for (int i = 0; i < 8; ++i) StoreEight(rows[i], panel + i % 4 * 64 + (n + i) / 4 * 16);
    }
  }
}
template <int G>
void UnpackPanel(const std::byte* panel, int64_t columns, Bf16* matrix) {
  for (int32_t n = 0; n < kPanel; n += 8, matrix += 8) {
    if constexpr (G == 2) {
      const Eight first = LoadEight(panel + n * 4), second = LoadEight(panel + n * 4 + 16);
      StoreEight(__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14), matrix);
      StoreEight(__builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15),
                 matrix + columns);
    } else {
      Eight rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = LoadEight(panel + i % 4 * 64 + (n + i) / 4 * 16);
      Transpose(rows);
      for (int i = 0; i < 8; ++i) StoreEight(rows[i], matrix + i * columns);
    }
  }
}

// Pack and unpack the rows [0, k) of a row-major matrix, G at a time; k is a multiple of G, which
// is the k_group of bf16 operands. Columns of the last panel, if it is not full, go one by one.
template <int G>
void PackGroups(const Groups& groups, const Bf16* matrix, int32_t k, int32_t columns,
                std::byte* panels) {
  for (int32_t i = 0; i < k; i += G, matrix += int64_t{G} * columns) {
    groups.ForPanels(i, columns, [&](int32_t n, int64_t offset) {
      PackPanel<G>(matrix + n, columns, panels + offset);
    });
    groups.ForLastColumns(i, columns, [&](int32_t n, int64_t offset) {
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
    groups.ForPanels(i, columns, [&](int32_t n, int64_t offset) {
      UnpackPanel<G>(panels + offset, columns, matrix + n);
    });
    groups.ForLastColumns(i, columns, [&](int32_t n, int64_t offset) {
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

// Undoes PackMatrix.
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
