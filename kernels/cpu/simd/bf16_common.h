// Shares code between the levels with bf16 operands: value panels, softmax to bf16 pairs,
// conversions. Needs AVX512F, BW, DQ, VL and BF16. Everything is in an unnamed namespace;
// fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_BF16_COMMON_H_
#define MLA_KERNELS_CPU_SIMD_BF16_COMMON_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/simd/kernel_set.h"

namespace mla::kernels::cpu {
namespace {

inline __mmask32 Mask32(int32_t count) {
  return count >= 32 ? 0xffffffffu : (1u << (count < 0 ? 0 : count)) - 1u;
}

// Prefetches the next tile's rows, a few cache lines at each step of a product.
class Prefetcher {
 public:
  explicit Prefetcher(const GemmArgs& g)
      : rows_(g.next_rows),
        remaining_(g.next_rows != nullptr ? g.next_count : 0),
        bytes_(g.next_bytes) {
    if (remaining_ > 0) NextRow();
  }

  inline void Step(int lines) {
    for (; lines > 0 && remaining_ > 0; --lines) {
      _mm_prefetch(line_, _MM_HINT_T1);
      line_ += 64;
      if (line_ < end_) continue;
      if (--remaining_ > 0) NextRow();
    }
  }

 private:
  void NextRow() {
    line_ = static_cast<const char*>(*rows_++);
    end_ = line_ + bytes_;
  }

  const void* const* rows_;
  const char* line_ = nullptr;
  const char* end_ = nullptr;
  int32_t remaining_, bytes_;
};

inline __m512i Bits(__m512bh v) { return reinterpret_cast<__m512i&>(v); }
inline __m512bh AsBf16(__m512i v) { return reinterpret_cast<__m512bh&>(v); }

// Returns 2^x for x <= 0: 2^f by a degree-6 polynomial on [-0.5, 0.5], scaled by 2^n with the right
// results for -inf (0) and NaN (NaN).
inline __m512 Exp2(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // -inf - -inf would be NaN. Any finite f will do there, because scalef by -inf gives 0.
  const __m512 f = _mm512_maskz_sub_ps(
      _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ), x, n);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.5403530e-4f), f, _mm512_set1_ps(1.3333558e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

// Returns the scaled logits of row r, columns [n, n + 16), -inf where invisible.
inline __m512 Logit(const SoftmaxArgs& args, __m512i visible, int32_t r, int32_t n) {
  const __m512 x =
      _mm512_mul_ps(_mm512_loadu_ps(args.s + r * args.lds + n), _mm512_set1_ps(args.scale2));
  const __mmask16 seen = _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(r));
  return _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), x);
}

// Running maximum, alpha and shift of 16 columns before their probabilities are made.
struct ColumnState {
  __m512i visible;
  __m512 shift, sum, norm;
};

inline ColumnState BeginColumns(const SoftmaxArgs& args, int32_t n) {
  ColumnState state;
  state.visible =
      args.visible != nullptr ? _mm512_loadu_si512(args.visible + n) : _mm512_set1_epi32(args.rows);
  const __m512 m_old = _mm512_loadu_ps(args.m + n);
  __m512 m = m_old;
  for (int32_t r = 0; r < args.rows; ++r) {
    m = _mm512_max_ps(m, Logit(args, state.visible, r, n));
  }
  // A column that has seen no logit shifts by 0, so that -inf - shift stays -inf.
  const __mmask16 empty = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
  state.shift = _mm512_mask_blend_ps(empty, m, _mm512_setzero_ps());
  const __m512 alpha = Exp2(_mm512_sub_ps(m_old, state.shift));
  state.sum = _mm512_mul_ps(_mm512_loadu_ps(args.l + n), alpha);
  state.norm = _mm512_mul_ps(_mm512_loadu_ps(args.norm + n), alpha);
  _mm512_storeu_ps(args.m + n, m);
  _mm512_storeu_ps(args.alpha + n, alpha);
  return state;
}

// Interleaves two rows of 16 values as 16 bf16 pairs.
inline __m512i ToPairs(__m512 even, __m512 odd) {
  const __m512i halves = Bits(_mm512_cvtne2ps_pbh(odd, even));  // 16 even, then 16 odd
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, halves);
}

// Returns the probabilities of rows r and r + 1 as 16 bf16 pairs, and in `rest` their rounding
// remainders if kRest. A row past the end counts as 0.
template <bool kRest>
inline __m512i ProbabilityPairs(const SoftmaxArgs& args, ColumnState& state, int32_t r, int32_t n,
                                __m512i* rest) {
  const __m512 even = Exp2(_mm512_sub_ps(Logit(args, state.visible, r, n), state.shift));
  __m512 odd = _mm512_setzero_ps();
  if (r + 1 < args.rows) {
    odd = Exp2(_mm512_sub_ps(Logit(args, state.visible, r + 1, n), state.shift));
  }
  state.sum = _mm512_add_ps(state.sum, _mm512_add_ps(even, odd));
  const __m512i pairs = ToPairs(even, odd);
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
  if constexpr (kRest) {
    *rest = ToPairs(_mm512_sub_ps(even, low), _mm512_sub_ps(odd, high));
    state.norm = _mm512_add_ps(state.norm, _mm512_add_ps(even, odd));
  } else {
    state.norm = _mm512_add_ps(state.norm, _mm512_add_ps(low, high));
  }
  return pairs;
}

inline void EndColumns(const SoftmaxArgs& args, const ColumnState& state, int32_t n) {
  _mm512_storeu_ps(args.l + n, state.sum);
  _mm512_storeu_ps(args.norm + n, state.norm);
}

// 32 values of each of two rows as pairs: 16 pairs for each of two panels.
struct ValuePairs {
  __m512i first, second;
};

inline ValuePairs PairValues(__m512i even, __m512i odd) {
  // After this order of quarters, unpack leaves 16 consecutive columns in each result.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  even = _mm512_permutexvar_epi64(order, even);
  odd = _mm512_permutexvar_epi64(order, odd);
  return {_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)};
}

void PackValues(const uint16_t* const* rows, int32_t count, int32_t d, uint16_t* panels,
                int64_t panel_bytes) {
  for (int32_t r = 0; r < count; r += 2) {
    uint8_t* out = reinterpret_cast<uint8_t*>(panels) + r * 32;
    for (int32_t i = 0; i < d; i += 32, out += 2 * panel_bytes) {
      const __mmask32 mask = Mask32(d - i);
      const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[r] + i);
      __m512i odd = _mm512_setzero_si512();
      if (r + 1 < count) odd = _mm512_maskz_loadu_epi16(mask, rows[r + 1] + i);
      const ValuePairs pairs = PairValues(even, odd);
      _mm512_storeu_si512(out, pairs.first);
      if (i + kPanel < d) _mm512_storeu_si512(out + panel_bytes, pairs.second);
    }
  }
}

void Widen(const uint16_t* const* rows, int32_t count, int32_t dim, float* out, int64_t ld) {
  for (int32_t r = 0; r < count; ++r, out += ld) {
    for (int32_t i = 0; i < dim; i += kPanel) {
      const auto mask = static_cast<__mmask16>(Mask32(dim - i));
      const __m256i narrow = _mm256_maskz_loadu_epi16(mask, rows[r] + i);
      _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
  }
}

void Narrow(const float* in, int64_t ld_in, int32_t count, int32_t dim, uint16_t* out,
            int64_t ld_out) {
  for (int32_t r = 0; r < count; ++r, in += ld_in, out += ld_out) {
    for (int32_t i = 0; i < dim; i += kPanel) {
      const auto mask = static_cast<__mmask16>(Mask32(dim - i));
      __m256bh narrow = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, in + i));
      _mm256_mask_storeu_epi16(out + i, mask, reinterpret_cast<__m256i&>(narrow));
    }
  }
}

inline __m512 SumOfRows(const float* const* rows, const float* weights, int32_t count, int32_t i,
                        __mmask16 mask) {
  __m512 sum = _mm512_setzero_ps();
  for (int32_t j = 0; j < count; ++j) {
    sum =
        _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, rows[j] + i), _mm512_set1_ps(weights[j]), sum);
  }
  return sum;
}

void WeightedSum(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                 float* out) {
  for (int32_t i = 0; i < dim; i += kPanel) {
    const auto mask = static_cast<__mmask16>(Mask32(dim - i));
    _mm512_mask_storeu_ps(out + i, mask, SumOfRows(rows, weights, count, i, mask));
  }
}

void WeightedSumNarrow(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                       uint16_t* out) {
  for (int32_t i = 0; i < dim; i += kPanel) {
    const auto mask = static_cast<__mmask16>(Mask32(dim - i));
    __m256bh narrow = _mm512_cvtneps_pbh(SumOfRows(rows, weights, count, i, mask));
    _mm256_mask_storeu_epi16(out + i, mask, reinterpret_cast<__m256i&>(narrow));
  }
}

void Split(const float* in, int32_t count, uint16_t* high, uint16_t* low) {
  for (int32_t i = 0; i < count; i += kPanel) {
    const auto mask = static_cast<__mmask16>(Mask32(count - i));
    const __m512 value = _mm512_maskz_loadu_ps(mask, in + i);
    __m256bh rounded = _mm512_cvtneps_pbh(value);
    const __m256i bits = reinterpret_cast<__m256i&>(rounded);
    const __m512 rest = _mm512_sub_ps(
        value, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
    // rest - rest is 0 where rest is finite and NaN elsewhere.
    const __mmask16 finite =
        _mm512_cmp_ps_mask(_mm512_sub_ps(rest, rest), _mm512_setzero_ps(), _CMP_EQ_OQ);
    __m256bh narrow = _mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, rest, _mm512_setzero_ps()));
    _mm256_mask_storeu_epi16(high + i, mask, bits);
    _mm256_mask_storeu_epi16(low + i, mask, reinterpret_cast<__m256i&>(narrow));
  }
}

inline float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_BF16_COMMON_H_
