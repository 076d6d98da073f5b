// Input and output of the inner loops: finds KV rows in their pages, and reads and writes elements
// of client tensors.
#ifndef MLA_KERNELS_CPU_ITEMS_ROW_IO_H_
#define MLA_KERNELS_CPU_ITEMS_ROW_IO_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/formats/dtype.h"
#include "kernels/host_memory/fragments.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/types/attention_params.h"

namespace mla::kernels::cpu {

// Finds the pages of rows, or of entries, of a sequence at a layer.
struct RowPages {
  int64_t page_table, layer_offset, row_stride;
  int32_t page_size;
  int32_t page_scales_bytes;  // KvRowLayout's
};

inline RowPages PagesOfRows(const SegmentRecord& segment, const KvRowLayout& at) {
  return {segment.page_table, segment.layer_offset, segment.row_stride, segment.page_size,
          at.page_scales_bytes};
}
inline RowPages PagesOfEntries(const WindowRecord& window, const KvRowLayout& at) {
  return {window.page_table, window.layer_offset, window.row_stride, window.page_size,
          at.page_scales_bytes};
}

// Receives the addresses of rows and, in formats that keep scales after a page's rows, of their
// scales.
struct FoundRows {
  const void** rows;
  const uint8_t** scales;  // null: not needed
  FoundRows Behind(int32_t count) const {
    return {rows + count, scales == nullptr ? nullptr : scales + count};
  }
};

// Finds where rows [begin, begin + count) lie in their pages.
inline void FindRows(const PoolView& pool, const RowPages& pages, int32_t begin, int32_t count,
                     const FoundRows& places) {
  const uint32_t* table = pool.page_tables + pages.page_table;
  for (int32_t i = 0; i < count;) {
    const int32_t position = begin + i;
    const int32_t slot = position % pages.page_size;
    const int32_t run = std::min(count - i, pages.page_size - slot);
    const std::byte* page =
        pool.base + table[position / pages.page_size] * kPageGranuleBytes + pages.layer_offset;
    for (int32_t k = 0; k < run; ++k) places.rows[i + k] = page + (slot + k) * pages.row_stride;
    if (places.scales != nullptr) {
      const auto* const scales =
          reinterpret_cast<const uint8_t*>(page + pages.page_size * pages.row_stride);
      for (int32_t k = 0; k < run; ++k) {
        places.scales[i + k] = scales + int64_t{slot + k} * pages.page_scales_bytes;
      }
    }
    i += run;
  }
}

// Finds the rows that `count` entries of an index list name; skips entries that are not below
// `bound`. Returns how many it found.
inline int32_t FindListedRows(const PoolView& pool, const RowPages& pages, const int32_t* list,
                              int32_t count, int32_t bound, const FoundRows& places) {
  const uint32_t* const table = pool.page_tables + pages.page_table;
  int32_t rows = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = list[i];
    if (position < 0 || position >= bound) continue;
    const int32_t index = position / pages.page_size;  // the only division per row
    const int32_t slot = position - index * pages.page_size;
    const std::byte* const page = pool.base + table[index] * kPageGranuleBytes + pages.layer_offset;
    places.rows[rows] = page + slot * pages.row_stride;
    if (places.scales != nullptr) {
      places.scales[rows] = reinterpret_cast<const uint8_t*>(
          page + pages.page_size * pages.row_stride + int64_t{slot} * pages.page_scales_bytes);
    }
    ++rows;
  }
  return rows;
}

inline float LoadElement(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(base)[index];
  return ToFloat(static_cast<const Bf16*>(base)[index]);
}

inline void StoreElement(void* base, DType dtype, int64_t index, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<Bf16*>(base)[index] = ToBf16(value);
  }
}

// Sets base[offset ..] to the weighted sum of `count` rows of `dim` elements.
inline void StoreSum(const KernelSet& kernels, const float* const* rows, const float* weights,
                     int32_t count, int32_t dim, DType dtype, void* base, int64_t offset) {
  if (dtype == DType::kF32) {
    kernels.weighted_sum(rows, weights, count, dim, static_cast<float*>(base) + offset);
  } else {
    kernels.weighted_sum_narrow(rows, weights, count, dim, static_cast<Bf16*>(base) + offset);
  }
}

// Sets base[offset ..] to row[0 .. dim) * factor.
inline void StoreRow(const KernelSet& kernels, const float* row, int32_t dim, float factor,
                     DType dtype, void* base, int64_t offset) {
  StoreSum(kernels, &row, &factor, 1, dim, dtype, base, offset);
}

// Copies bf16 elements into a row of bf16 or fp32 operands, from element `offset` on.
inline void CopyOperands(const Bf16* from, int32_t count, bool bf16, std::byte* row,
                         int64_t offset) {
  if (bf16) {
    std::memcpy(row + offset * 2, from, static_cast<size_t>(count) * sizeof(Bf16));
    return;
  }
  float* out = reinterpret_cast<float*>(row) + offset;
  for (int32_t i = 0; i < count; ++i) out[i] = ToFloat(from[i]);
}

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_ROW_IO_H_
