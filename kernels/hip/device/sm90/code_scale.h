// Codes of e4m3 from bf16 numbers: the power of two that these are divided by, and the rounding.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_

#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

struct CodeScale {
  float power, inverse;
};

// For numbers whose largest magnitude has these bits: brings it to at most 448, which is 1.75 x
// 2^8, and to more than 224. Exponents are bounded so that both the scale and its inverse are
// normal.
MLA_DEVICE CodeScale code_scale(uint32_t largest) {
  const uint32_t above = (largest & 0x7fffffu) > 0x600000u ? 1u : 0u;
  const uint32_t found = (largest >> 23) + above;
  const uint32_t exponent = found < 20 ? 20 : found > 250 ? 250 : found;
  return {bits_to_float((exponent - 8) << 23), bits_to_float((254 + 8 - exponent) << 23)};
}

// Returns the greater of a chunk's magnitudes and `halves`, which has two: bits of bf16 numbers,
// NaN the largest.
MLA_DEVICE uint32_t greater_magnitudes(uint32_t halves, const Chunk& values) {
#pragma unroll
  for (int w = 0; w < 4; ++w) halves = tile::greater_halves(halves, values.w[w] & 0x7fff7fffu);
  return halves;
}
// Returns the bits, as fp32, of the greater of two magnitudes.
MLA_DEVICE uint32_t greater_half(uint32_t halves) {
  const uint32_t high = halves & 0xffff0000u, low = halves << 16;
  return high > low ? high : low;
}

// Returns the codes of two pairs of numbers times the power of two of which `by` is a pair.
MLA_DEVICE uint32_t scaled_codes(uint32_t a, uint32_t b, uint32_t by) {
  a = tile::multiply_bf16_pairs(a, by);
  b = tile::multiply_bf16_pairs(b, by);
  return tile::pack_e4m3(bits_to_float(a << 16), bits_to_float(a & 0xffff0000u),
                         bits_to_float(b << 16), bits_to_float(b & 0xffff0000u));
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_
