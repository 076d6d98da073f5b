// Softmax of the level `amx`. Needs what amx_tiles.h needs. Everything is in an unnamed namespace;
// fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_
#define MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_

#include "kernels/cpu/simd/amx_tiles.h"

namespace mla::kernels::cpu {
namespace {

constexpr int32_t kLdp = kMostKvRows;  // p: bf16 [columns][kLdp], KV rows padded to 32 with zeros
static_assert(kLdp * 2 <= kTileRows * 4, "the room for p");

// Returns 2^x for x <= 0: 2^f by a degree-5 polynomial on [0, 1), scaled by 2^floor(x). It takes a
// quarter fewer instructions than Exp2 and is as accurate as the levels promise. -inf has f = 0 and
// gives 0, NaN gives NaN.
inline __m512 Exp2ByFloor(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.8671301e-3f), f, _mm512_set1_ps(9.0170302e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5799913e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4016445e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9315131e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, x);
}

// Returns what Logit returns, in fewer instructions where all rows are visible.
inline __m512 LogitOf(const SoftmaxArgs& args, __m512i visible, int32_t r, int32_t n) {
  if (args.visible != nullptr) return Logit(args, visible, r, n);
  return _mm512_mul_ps(_mm512_loadu_ps(args.s + r * args.lds + n), _mm512_set1_ps(args.scale2));
}

// Returns the running maxima of columns [n, n + 16) after this tile. It takes four rows at a time,
// so that instructions do not wait for each other.
inline __m512 MaximumOf(const SoftmaxArgs& args, __m512i visible, int32_t n) {
  __m512 m = _mm512_loadu_ps(args.m + n);
  int32_t r = 0;
  for (; r + 4 <= args.rows; r += 4) {
    const __m512 first =
        _mm512_max_ps(LogitOf(args, visible, r, n), LogitOf(args, visible, r + 1, n));
    const __m512 second =
        _mm512_max_ps(LogitOf(args, visible, r + 2, n), LogitOf(args, visible, r + 3, n));
    m = _mm512_max_ps(m, _mm512_max_ps(first, second));
  }
  for (; r < args.rows; ++r) m = _mm512_max_ps(m, LogitOf(args, visible, r, n));
  return m;
}

// Does what BeginColumns does, for WeightOf.
inline ColumnState BeginFusedColumns(const SoftmaxArgs& args, int32_t n) {
  ColumnState state;
  state.visible =
      args.visible != nullptr ? _mm512_loadu_si512(args.visible + n) : _mm512_setzero_si512();
  const __m512 m = MaximumOf(args, state.visible, n);
  // A column that has seen no logit shifts by 0, so that -inf - shift stays -inf.
  const __mmask16 empty = _mm512_cmp_ps_mask(m, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
  state.shift = _mm512_mask_blend_ps(empty, m, _mm512_setzero_ps());
  const __m512 alpha = Exp2ByFloor(_mm512_sub_ps(_mm512_loadu_ps(args.m + n), state.shift));
  // A finite logit that overflows when it is rounded makes the shift infinite. WeightOf does not
  // round it, so all weights would be 0 and the column would count as empty. The other levels give
  // NaN there.
  const __m512 bad = _mm512_sub_ps(state.shift, state.shift);
  state.sum = _mm512_fmadd_ps(_mm512_loadu_ps(args.l + n), alpha, bad);
  state.norm = _mm512_fmadd_ps(_mm512_loadu_ps(args.norm + n), alpha, bad);
  _mm512_storeu_ps(args.m + n, m);
  _mm512_storeu_ps(args.alpha + n, alpha);
  return state;
}

// Returns the weights of row r, 0 past the end. There is one rounding less than in LogitOf, so the
// largest weight may differ from 1 by as much as rounding the logit does; alpha uses the same m, so
// the quotient does not move.
inline __m512 WeightOf(const SoftmaxArgs& args, const ColumnState& state, int32_t r, int32_t n) {
  if (r >= args.rows) return _mm512_setzero_ps();
  __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(args.s + r * args.lds + n),
                             _mm512_set1_ps(args.scale2), state.shift);
  if (args.visible != nullptr) {
    const __mmask16 seen = _mm512_cmpgt_epi32_mask(state.visible, _mm512_set1_epi32(r));
    x = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), x);
  }
  return Exp2ByFloor(x);
}

// Returns the weights of rows r and r + 1 as 16 bf16 pairs.
inline __m512i WeightPairs(const SoftmaxArgs& args, ColumnState& state, int32_t r, int32_t n) {
  const __m512 even = WeightOf(args, state, r, n), odd = WeightOf(args, state, r + 1, n);
  state.sum = _mm512_add_ps(state.sum, _mm512_add_ps(even, odd));
  const __m512i pairs = ToPairs(even, odd);
  // Products with ones add both halves of each pair.
  state.norm = _mm512_dpbf16_ps(state.norm, AsBf16(pairs), AsBf16(_mm512_set1_epi16(0x3f80)));
  return pairs;
}

void SoftmaxWithoutRests(const SoftmaxArgs& args) {
  for (int32_t n = 0; n < args.columns; n += kPanel) {
    ColumnState state = BeginFusedColumns(args, n);
    uint16_t* p = static_cast<uint16_t*>(args.p) + n * kLdp;
    for (int32_t r = 0; r < args.rows; r += kDepth) {
      __m512i pairs[kRows];
      for (int32_t i = 0; i < kRows; ++i) pairs[i] = WeightPairs(args, state, r + 2 * i, n);
      Transpose16(pairs);
      for (int32_t i = 0; i < kRows; ++i) _mm512_storeu_si512(p + i * kLdp + r, pairs[i]);
    }
    EndColumns(args, state, n);
  }
}

// As SoftmaxWithoutRests, with the remainders of rounding in args.p_rest.
void SoftmaxWithRests(const SoftmaxArgs& args) {
  for (int32_t n = 0; n < args.columns; n += kPanel) {
    ColumnState state = BeginColumns(args, n);
    uint16_t* p = static_cast<uint16_t*>(args.p) + n * kLdp;
    uint16_t* p_rest = static_cast<uint16_t*>(args.p_rest) + n * kLdp;
    for (int32_t r = 0; r < args.rows; r += kDepth) {
      __m512i pairs[kRows], rest[kRows];
      for (int32_t i = 0; i < kRows; ++i) {
        pairs[i] = rest[i] = _mm512_setzero_si512();
        if (r + 2 * i >= args.rows) continue;
        pairs[i] = ProbabilityPairs<true>(args, state, r + 2 * i, n, &rest[i]);
      }
      Transpose16(pairs);
      for (int32_t i = 0; i < kRows; ++i) _mm512_storeu_si512(p + i * kLdp + r, pairs[i]);
      Transpose16(rest);
      for (int32_t i = 0; i < kRows; ++i) _mm512_storeu_si512(p_rest + i * kLdp + r, rest[i]);
    }
    EndColumns(args, state, n);
  }
}

void Softmax(const SoftmaxArgs& args) {
  if (args.p_rest != nullptr) {
    SoftmaxWithRests(args);
  } else {
    SoftmaxWithoutRests(args);
  }
}

float Probability(const SoftmaxArgs& args, int32_t row, int32_t column) {
  return FromBf16(static_cast<const uint16_t*>(args.p)[column * kLdp + row]);
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_
