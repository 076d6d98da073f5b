// The power of two that numbers are divided by before they become e4m3.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_

#include "kernels/hip/device/target/vendor.h"

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

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_CODE_SCALE_H_
