// Small conversions at the edges of the inner loops: elements of user tensors in and out.
#ifndef MLA_KERNELS_CPU_ROW_IO_H_
#define MLA_KERNELS_CPU_ROW_IO_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernel_set.h"
#include "kernels/dtype.h"

namespace mla::kernels::cpu {

inline float LoadElement(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(base)[index];
  return ToFloat(static_cast<const Bf16*>(base)[index]);
}

// base[offset ..] = row[0 .. dim) * factor.
inline void StoreRow(const KernelSet& kernels, const float* row, int32_t dim, float factor,
                     DType dtype, void* base, int64_t offset) {
  if (dtype == DType::kF32) {
    kernels.scale(row, dim, factor, static_cast<float*>(base) + offset);
  } else {
    kernels.scale_narrow(row, dim, factor, static_cast<Bf16*>(base) + offset);
  }
}

// bf16 high and low parts whose sum is an fp32 value to 16 bits; the low part of a value that is
// not finite is 0.
inline void SplitBf16(float value, Bf16* high, Bf16* low) {
  *high = ToBf16(value);
  const float rest = value - ToFloat(*high);
  *low = std::isfinite(rest) ? ToBf16(rest) : Bf16{0};
}

// A B-panel column of each part: element i goes to out[32 * (i / 2) + i % 2].
inline void PackSplitColumn(const float* row, int32_t dim, Bf16* high, Bf16* low) {
  for (int32_t i = 0; i < dim; ++i) {
    const int64_t at = static_cast<int64_t>(i / 2) * 32 + i % 2;
    SplitBf16(row[i], high + at, low + at);
  }
}

// Copies bf16 elements behind `offset` operand elements of a row of bf16 or fp32 operands.
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

#endif  // MLA_KERNELS_CPU_ROW_IO_H_
