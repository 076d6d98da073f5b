// Widens rows of 8-bit formats to bf16 rows with AVX-512 VBMI, 64 values at a time. Tables of 128
// bytes in registers give the low and the high byte of a value. See fp8_rows.h.
#ifndef MLA_KERNELS_CPU_SIMD_FP8_VBMI_H_
#define MLA_KERNELS_CPU_SIMD_FP8_VBMI_H_

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/fp8_rows.h"

namespace mla::kernels::cpu {
namespace {

// Holds the bytes of bf16 magnitudes by code, and of twice the magnitudes. Exponents of even shifts
// lie in the high byte alone, and an odd shift is an even shift of the double.
struct ByteTables {
  uint8_t low[2][128], high[2][128];
  uint8_t scaled[128];  // 0xff if a shift changes the value: it is neither zero nor NaN
};

constexpr ByteTables MakeByteTables() {
  ByteTables tables{};
  for (uint32_t code = 0; code < 128; ++code) {
    const uint32_t once = Bf16OfMagnitude(code);
    const bool scaled = once != 0 && once != kBf16NaN;
    const uint32_t twice = scaled ? once + 0x80 : once;
    tables.low[0][code] = static_cast<uint8_t>(once);
    tables.high[0][code] = static_cast<uint8_t>(once >> 8);
    tables.low[1][code] = static_cast<uint8_t>(twice);
    tables.high[1][code] = static_cast<uint8_t>(twice >> 8);
    tables.scaled[code] = scaled ? 0xff : 0;
  }
  return tables;
}

constexpr ByteTables kByteTables = MakeByteTables();

inline __m512i ShiftedHigh(const uint8_t* high, const uint8_t* scaled, __m512i shift) {
  const __m512i added = _mm512_and_si512(_mm512_loadu_si512(scaled), shift);
  return _mm512_add_epi8(_mm512_loadu_si512(high), added);
}

inline void WidenVectors(const uint8_t* codes, int32_t count, int32_t shift, uint16_t* out) {
  const ByteTables& t = kByteTables;
  const int32_t odd = shift & 1;
  const __m512i half = _mm512_set1_epi8(static_cast<char>((shift - odd) / 2));
  const __m512i low0 = _mm512_loadu_si512(t.low[odd]), low1 = _mm512_loadu_si512(t.low[odd] + 64);
  const __m512i high0 = ShiftedHigh(t.high[odd], t.scaled, half);
  const __m512i high1 = ShiftedHigh(t.high[odd] + 64, t.scaled + 64, half);
  // After this order of eighths, unpack leaves 32 consecutive values in each result.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const __m512i sign = _mm512_set1_epi8(-128);
  for (int32_t i = 0; i < count; i += 64) {
    const int32_t remaining = count - i;
    const uint64_t mask = remaining >= 64 ? ~uint64_t{0} : (uint64_t{1} << remaining) - 1;
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, codes + i));
    const __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, x, high1);
    const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(x, sign));
    _mm512_mask_storeu_epi16(out + i, static_cast<__mmask32>(mask),
                             _mm512_unpacklo_epi8(low, high));
    if (remaining > 32) {
      _mm512_mask_storeu_epi16(out + i + 32, static_cast<__mmask32>(mask >> 32),
                               _mm512_unpackhi_epi8(low, high));
    }
  }
}

void WidenFp8(const Fp8RowsArgs& args) { WidenRows(args, WidenVectors); }

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_FP8_VBMI_H_
