// Computes the addresses that all kernels need: pages of the pool and rows of the caller's tensors.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_MEMORY_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_MEMORY_H_

#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// Kind of the 8-bit floats of pools on this architecture; equals ArchTraits::fp8.
inline constexpr Fp8Kind kPoolFp8 = MLA_GFX942 ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;

// The largest valid scale of a row, as bits.
inline constexpr uint32_t kLargestScaleBits = __builtin_bit_cast(
    uint32_t, kernels::kLargestKvScale*(kPoolFp8 == Fp8Kind::kE4m3Fn ? 1.0f : 2.0f));
// As kernels::KvScale, but without a comparison, whose result would take scalar registers.
MLA_DEVICE float stored_scale(float scale) {
  const uint32_t bits = float_to_bits(scale);
  const uint32_t bounded = bits < kLargestScaleBits + 1 ? bits : kLargestScaleBits + 1;
  return bits_to_float(bits | (0u - ((kLargestScaleBits - bounded) >> 31)));
}

// Addresses the rows of one sequence at one layer. Arithmetic that can exceed 2 GiB is 64-bit.
struct PagedRows {
  const uint32_t* table;
  const uint8_t* base;  // pool + layer offset
  int64_t row_stride;
  int64_t granule_bytes;
  int page_size;
  int shift;  // log2(page_size), or -1 if it is not a power of two

  MLA_DEVICE PagedRows(const uint32_t* page_tables, int64_t first_entry, const uint8_t* pool,
                       int64_t layer_offset, int64_t row_stride_bytes, int page_rows,
                       int64_t granule)
      : PagedRows(page_tables + first_entry, pool + layer_offset, row_stride_bytes, page_rows,
                  (page_rows & (page_rows - 1)) == 0 ? 31 - leading_zeros(page_rows) : -1,
                  granule) {}
  // Makes the rows from members that a caller has kept.
  MLA_DEVICE PagedRows(const uint32_t* entries, const uint8_t* first, int64_t row_stride_bytes,
                       int page_rows, int page_shift, int64_t granule)
      : table(entries),
        base(first),
        row_stride(row_stride_bytes),
        granule_bytes(granule),
        page_size(page_rows),
        shift(page_shift) {}

  // Names the place of a row: the index of its page in the table, and its row inside that page.
  struct Place {
    int page, inside;
  };
  MLA_DEVICE Place place(int position) const {
    // The resource report covers powers of two; with other page sizes every loop iteration divides.
    if (shift >= 0) return Place{position >> shift, position & (page_size - 1)};
    exclude_from_report_begin();
    const int page = position / page_size;
    const Place place{page, position - page * page_size};
    exclude_from_report_end();
    return place;
  }
  MLA_DEVICE uint32_t granule(int page) const { return as_global<const uint32_t>(table)[page]; }
  MLA_DEVICE const uint8_t* address(uint32_t granule_of_page, int inside) const {
    return base + static_cast<int64_t>(granule_of_page) * granule_bytes +
           static_cast<int64_t>(inside) * row_stride;
  }
  MLA_DEVICE const uint8_t* row(int position) const {
    const Place p = place(position);
    return address(granule(p.page), p.inside);
  }
};

// Loads eight consecutive elements from `index` on as bf16. `aligned`: the address is a multiple of
// 16.
MLA_DEVICE Chunk load_chunk(const void* base, int64_t index, bool is_f32, bool aligned) {
  Chunk c;
  if (is_f32) {
    const auto* p = as_global<const float>(base) + index;
#pragma unroll
    for (int i = 0; i < 4; ++i) c.w[i] = pack_bf16(p[2 * i], p[2 * i + 1]);
  } else if (aligned) {
    load_words(c.w, static_cast<const uint16_t*>(base) + index);
  } else {
    const auto* p = as_global<const uint16_t>(base) + index;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c.w[i] = static_cast<uint32_t>(p[2 * i]) | (static_cast<uint32_t>(p[2 * i + 1]) << 16);
    }
  }
  return c;
}

// Loads the bits of eight consecutive floats. `aligned`: the address is a multiple of 16.
MLA_DEVICE void load_floats(uint32_t (&out)[8], const void* from, bool aligned) {
  const auto* p = as_global<const float>(from);
  if (aligned) {
    uint32_t half[4];
    load_words(half, static_cast<const uint8_t*>(from));
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = half[i];
    load_words(half, static_cast<const uint8_t*>(from) + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 + i] = half[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = float_to_bits(p[i]);
  }
}

MLA_DEVICE bool aligned_to(const void* base, int64_t stride_a, int64_t stride_b, int element_bytes,
                           int bytes) {
  const int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(base)) |
                       (stride_a * element_bytes) | (stride_b * element_bytes);
  return (bits & (bytes - 1)) == 0;
}

// Stores `kCount` (2 or 4) consecutive results from `index` on. `aligned`: to kCount elements.
template <int kCount>
MLA_DEVICE void store_run(void* base, int64_t index, const float (&x)[kCount], bool is_f32,
                          bool aligned) {
  if (is_f32) {
    if (aligned) {
      uint32_t words[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = float_to_bits(x[i]);
      store_words(static_cast<float*>(base) + index, words);
      return;
    }
    auto* p = as_global<float>(base) + index;
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = x[i];
    return;
  }
  if (aligned) {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    store_words(static_cast<uint16_t*>(base) + index, words);
    return;
  }
  auto* p = as_global<uint16_t>(base) + index;
#pragma unroll
  for (int i = 0; i < kCount; ++i) p[i] = to_bf16(x[i]);
}

// Stores words c to c + 3 of a row whose words have an order other than PartOrder::kColumns, at
// their true columns. In each kColumns columns, words 4 q and on are columns 2 q, 2 q + 1,
// kColumns / 2 + 2 q and the next. `aligned`: to four elements.
template <int kColumns>
MLA_DEVICE void store_halves(void* row, int c, const float (&x)[4], bool is_f32, bool aligned) {
  const int first = (c & ~(kColumns - 1)) + (c & (kColumns - 1)) / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float run[2] = {x[2 * half], x[2 * half + 1]};
    store_run(row, first + kColumns / 2 * half, run, is_f32, aligned);
  }
}
MLA_DEVICE void store_exchanged(void* row, int c, const float (&x)[4], bool is_f32, bool aligned) {
  store_halves<16>(row, c, x, is_f32, aligned);
}
MLA_DEVICE void store_paired(void* row, int c, const float (&x)[4], bool is_f32, bool aligned) {
  store_halves<128>(row, c, x, is_f32, aligned);
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_MEMORY_H_
