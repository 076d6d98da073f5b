// Softmax of the level `amx`. Needs what amx_tiles.h needs. Everything is in an unnamed namespace;
// fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_
#define MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_

#include "kernels/cpu/simd/amx_tiles.h"

namespace mla::kernels::cpu {
namespace {

constexpr int32_t kLdp = kTileRows;  // p: bf16 [columns][kLdp], KV rows padded to 32 with zeros

// Returns 2^x for x <= 0: 2^f by a degree-5 polynomial on [0, 1), scaled by 2^floor(x). It takes a
// quarter fewer instructions than Exp2 and is as accurate as the levels promise. -inf has f = 0 and
// gives 0, NaN gives NaN.
inline __m512 Exp2Above(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.8671301e-3f), f, _mm512_set1_ps(9.0170302e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5799913e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4016445e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9315131e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, x);
}

// The softmax step of some columns of a tile, 16 columns at a time: maxima, 32 rows a part; then
// probabilities, 2 rows a part, and after 32 rows one part that transposes and stores them.
class SoftmaxJob {
 public:
  // For columns [first, end), multiples of kPanel. REQUIRES: `args` outlives the job.
  SoftmaxJob(const SoftmaxArgs& args, int32_t first, int32_t end)
      : args_(args), column_(first), end_(end) {
    if (column_ < end_) BeginColumns16();
  }

  void Finish() {
    while (column_ < end_) Part();
  }

 private:
  inline void Part() {
    if (column_ == end_) return;
    if (maxima_ < args_.rows) {
      AddMaxima();
    } else if (pair_ < kRows) {
      AddPair();
    } else {
      StorePairs();
    }
  }

  inline __m512 LogitAt(int32_t r) const {
    if (args_.visible != nullptr) return Logit(args_, visible_, r, column_);
    return _mm512_mul_ps(_mm512_loadu_ps(args_.s + r * args_.lds + column_),
                         _mm512_set1_ps(args_.scale2));
  }

  inline void BeginColumns16() {
    if (args_.visible != nullptr) visible_ = _mm512_loadu_si512(args_.visible + column_);
    m_ = _mm512_loadu_ps(args_.m + column_);
    maxima_ = row_ = pair_ = 0;
  }

  // Four maxima, so that the instructions of a part do not wait for each other.
  inline void AddMaxima() {
    const int32_t end = args_.rows - maxima_ < kDepth ? args_.rows : maxima_ + kDepth;
    int32_t r = maxima_;
    for (; r + 4 <= end; r += 4) {
      const __m512 first = _mm512_max_ps(LogitAt(r), LogitAt(r + 1));
      const __m512 second = _mm512_max_ps(LogitAt(r + 2), LogitAt(r + 3));
      m_ = _mm512_max_ps(m_, _mm512_max_ps(first, second));
    }
    for (; r < end; ++r) m_ = _mm512_max_ps(m_, LogitAt(r));
    maxima_ = end;
    if (maxima_ == args_.rows) SetShift();
  }

  inline void SetShift() {
    // A column that has seen no logit shifts by 0, so that -inf - shift stays -inf.
    const __mmask16 empty = _mm512_cmp_ps_mask(m_, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
    shift_ = _mm512_mask_blend_ps(empty, m_, _mm512_setzero_ps());
    const __m512 alpha = Exp2Above(_mm512_sub_ps(_mm512_loadu_ps(args_.m + column_), shift_));
    sum_ = _mm512_mul_ps(_mm512_loadu_ps(args_.l + column_), alpha);
    norm_ = _mm512_mul_ps(_mm512_loadu_ps(args_.norm + column_), alpha);
    _mm512_storeu_ps(args_.m + column_, m_);
    _mm512_storeu_ps(args_.alpha + column_, alpha);
  }

  // One rounding less than in LogitAt, so the largest weight may differ from 1 by a few last
  // places.
  inline __m512 Weight(int32_t r) const {
    if (r >= args_.rows) return _mm512_setzero_ps();
    __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(args_.s + r * args_.lds + column_),
                               _mm512_set1_ps(args_.scale2), shift_);
    if (args_.visible != nullptr) {
      const __mmask16 seen = _mm512_cmpgt_epi32_mask(visible_, _mm512_set1_epi32(r));
      x = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), x);
    }
    return Exp2Above(x);
  }

  inline void AddPair() {
    const int32_t r = row_ + 2 * pair_;
    const __m512 even = Weight(r), odd = Weight(r + 1);
    sum_ = _mm512_add_ps(sum_, _mm512_add_ps(even, odd));
    const __m512i pairs = ToPairs(even, odd);
    // Products with ones add both halves of each pair.
    norm_ = _mm512_dpbf16_ps(norm_, AsBf16(pairs), AsBf16(_mm512_set1_epi16(0x3f80)));
    pairs_[pair_++] = pairs;
  }

  inline void StorePairs() {
    __m512i pairs[kRows];
#pragma GCC unroll 16
    for (int32_t i = 0; i < kRows; ++i) pairs[i] = pairs_[i];
    Transpose16(pairs);
    uint16_t* p = static_cast<uint16_t*>(args_.p) + column_ * kLdp + row_;
#pragma GCC unroll 16
    for (int32_t i = 0; i < kRows; ++i) _mm512_storeu_si512(p + i * kLdp, pairs[i]);
    row_ += kDepth;
    pair_ = 0;
    if (row_ < args_.rows) return;
    _mm512_storeu_ps(args_.l + column_, sum_);
    _mm512_storeu_ps(args_.norm + column_, norm_);
    column_ += kPanel;
    if (column_ < end_) BeginColumns16();
  }

  const SoftmaxArgs& args_;
  int32_t column_;  // the first of the 16 columns at work
  const int32_t end_;
  int32_t maxima_ = 0;  // rows whose maximum is known
  int32_t row_ = 0;     // the first of the 32 rows at work
  int32_t pair_ = 0;    // pairs of these rows that are made
  __m512i visible_;
  __m512 m_, shift_, sum_, norm_;
  __m512i pairs_[kRows];
};

// As SoftmaxJob for all columns, with the remainders of rounding in args.p_rest.
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
    SoftmaxJob(args, 0, args.columns).Finish();
  }
}

float Probability(const SoftmaxArgs& args, int32_t row, int32_t column) {
  return FromBf16(static_cast<const uint16_t*>(args.p)[column * kLdp + row]);
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_AMX_SOFTMAX_H_
