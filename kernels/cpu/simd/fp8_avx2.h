// Widens rows of 8-bit formats to bf16 rows with AVX2: both bytes of 32 values at a time. See
// fp8_rows.h.
#ifndef MLA_KERNELS_CPU_SIMD_FP8_AVX2_H_
#define MLA_KERNELS_CPU_SIMD_FP8_AVX2_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/simd/fp8_rows.h"

namespace mla::kernels::cpu {
namespace {

inline __m256i Bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// Widens 32 codes to 16 + 16 values, times 2^shift; `exponent` is shift in the place of a bf16
// exponent. Zero stays zero, and NaN stays NaN.
inline void WidenVector(__m256i codes, __m256i exponent, __m256i* first, __m256i* second) {
  // These are the bytes of kBf16Units.
  const __m256i low_units =
      _mm256_setr_epi8(0, 0, -128, -64, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0,  //
                       0, 0, -128, -64, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256i high_units =
      _mm256_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0,  //
                       0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
  // After this order of quarters, unpack leaves 16 consecutive values in each result.
  codes = _mm256_permute4x64_epi64(codes, 0xd8);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_and_si256(codes, Bytes(0x7f));
  const __m256i small = _mm256_cmpeq_epi8(_mm256_and_si256(codes, Bytes(0x78)), zero);
  const __m256i nan = _mm256_cmpeq_epi8(magnitude, Bytes(0x7f));
  __m256i low = _mm256_and_si256(_mm256_slli_epi16(codes, 4), Bytes(0xf0));
  __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), Bytes(0x07));
  high = _mm256_add_epi8(high, Bytes(0x3c));
  low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(low_units, magnitude), small);
  high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(high_units, magnitude), small);
  low = _mm256_or_si256(low, nan);
  high = _mm256_or_si256(high, nan);
  high = _mm256_or_si256(high, _mm256_and_si256(codes, Bytes(0x80)));
  // Both bytes of values that must not be scaled: zeros and NaN.
  const __m256i fixed = _mm256_or_si256(nan, _mm256_cmpeq_epi8(magnitude, zero));
  const __m256i first_shift = _mm256_andnot_si256(_mm256_unpacklo_epi8(fixed, fixed), exponent);
  const __m256i second_shift = _mm256_andnot_si256(_mm256_unpackhi_epi8(fixed, fixed), exponent);
  *first = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), first_shift);
  *second = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), second_shift);
}

inline void WidenVectors(const uint8_t* codes, int32_t count, int32_t shift, uint16_t* out) {
  const __m256i exponent = _mm256_set1_epi16(static_cast<int16_t>(shift * 128));
  __m256i wide[2];
  int32_t i = 0;
  for (; i + 32 <= count; i += 32) {
    WidenVector(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)), exponent, &wide[0],
                &wide[1]);
    memcpy(out + i, wide, sizeof wide);
  }
  if (i == count) return;
  __m256i last = _mm256_setzero_si256();
  memcpy(&last, codes + i, static_cast<size_t>(count - i));
  WidenVector(last, exponent, &wide[0], &wide[1]);
  memcpy(out + i, wide, static_cast<size_t>(count - i) * 2);
}

void WidenFp8(const Fp8RowsArgs& args) { WidenRows(args, WidenVectors); }

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_FP8_AVX2_H_
