// 2^x for softmax, over the compiler's vector types; see fp32_kernels.h for how it is included.
//
// Gives 2^x for x <= 0, and 0 for results below 2^-126. NaN stays NaN, -inf gives 0; relative error
// below 2.5e-7 (tested over the whole range on every level that the machine runs).
#ifndef MLA_KERNELS_CPU_SIMD_EXP2_H_
#define MLA_KERNELS_CPU_SIMD_EXP2_H_

#include <stdint.h>

#ifndef MLA_LANES
#error "define MLA_LANES (4, 8 or 16) before including this file"
#endif

namespace mla::kernels::cpu {
namespace {

typedef float VecF __attribute__((vector_size(4 * MLA_LANES)));
typedef int32_t VecI __attribute__((vector_size(4 * MLA_LANES)));

inline VecF Splat(float value) { return value - VecF{}; }

// x = n + f with n the nearest integer: 2^f is a degree-6 polynomial on [-0.5, 0.5], and 2^n is
// made from its exponent bits. Comparisons are written so that NaN falls through to the arithmetic.
inline VecF Exp2(VecF x) {
  const VecF clamped = x < -127.0f ? Splat(-127.0f) : x;
  const VecF n = (clamped + 12582912.0f) - 12582912.0f;
  const VecF f = clamped - n;
  VecF y = 1.5403530e-4f * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  const VecI exponent = (__builtin_convertvector(n, VecI) + 127) << 23;
  VecF power;
  __builtin_memcpy(&power, &exponent, sizeof power);
  return y * power;
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_EXP2_H_
