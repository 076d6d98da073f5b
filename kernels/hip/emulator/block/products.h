// Emulates the arithmetic of matrix instructions: d [rows x cols] += a [rows x depth] b [depth x
// cols], with bf16 operands and fp32 sums in the order of the depth.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_PRODUCTS_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_PRODUCTS_H_

#include <cstdint>

namespace mla::kernels::hip::host {

inline float WideBf16(uint16_t x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

// a [rows][depth], b [depth][cols] and d [rows][cols] are dense and aligned to 32 bytes; `cols` is
// a multiple of 8.
void MultiplyAdd(float* d, const float* a, const float* b, int rows, int cols, int depth);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_PRODUCTS_H_
