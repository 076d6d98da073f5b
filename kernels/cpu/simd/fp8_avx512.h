// Widens rows of 8-bit formats to bf16 rows with AVX-512 F and BW: 32 values in 16-bit lanes at a
// time. See fp8_rows.h.
#ifndef MLA_KERNELS_CPU_SIMD_FP8_AVX512_H_
#define MLA_KERNELS_CPU_SIMD_FP8_AVX512_H_

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/fp8_rows.h"

namespace mla::kernels::cpu {
namespace {

// Widens 32 codes, one in each 16-bit lane, to bf16 values times 2^shift; `exponent` is shift in
// the place of a bf16 exponent. Zero and NaN do not change.
inline __m512i WidenLanes(__m512i codes, __m512i exponent) {
  const __m512i units =
      _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                       kBf16Units[7], kBf16Units[6], kBf16Units[5], kBf16Units[4], kBf16Units[3],
                       kBf16Units[2], kBf16Units[1], kBf16Units[0]);
  const __m512i all = _mm512_set1_epi16(0x7f);
  const __m512i magnitude = _mm512_and_si512(codes, all);
  const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
  const __mmask32 number = _mm512_cmpneq_epi16_mask(magnitude, all);
  const __mmask32 scaled = _mm512_mask_test_epi16_mask(number, magnitude, magnitude);
  __m512i wide = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
  wide = _mm512_mask_permutexvar_epi16(wide, small, magnitude, units);
  wide = _mm512_mask_blend_epi16(number, _mm512_set1_epi16(kBf16NaN), wide);
  wide = _mm512_mask_add_epi16(wide, scaled, wide, exponent);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-0x8000));
  return _mm512_or_si512(wide, sign);
}

inline void WidenVectors(const uint8_t* codes, int32_t count, int32_t shift, uint16_t* out) {
  const __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>(shift * 128));
  for (int32_t i = 0; i < count; i += 32) {
    const __mmask32 mask = count - i >= 32 ? 0xffffffffu : (1u << (count - i)) - 1u;
    const __m256i narrow = _mm256_maskz_loadu_epi8(mask, codes + i);
    const __m512i wide = WidenLanes(_mm512_cvtepu8_epi16(narrow), exponent);
    _mm512_mask_storeu_epi16(out + i, mask, wide);
  }
}

void WidenFp8(const Fp8RowsArgs& args) { WidenRows(args, WidenVectors); }

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_FP8_AVX512_H_
