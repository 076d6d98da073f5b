#include "kernels/cpu/simd/bf16_common.h"

namespace mla::kernels::cpu {
namespace {

constexpr int kAccumulators = 24;

inline __m512bh Pair(const uint16_t* from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  return AsBf16(_mm512_set1_epi32(pair));
}

// M rows against N panels. U pairs of k are taken at a time, so that the M row pointers, which do
// not all fit registers, are reloaded seldom.
template <int M, int N, int U>
inline void DotPairs(const uint16_t* const (&a)[M], int32_t pair, const uint8_t* b,
                     int64_t panel_bytes, __m512 (&sum)[M][N]) {
  __m512bh bv[U][N];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      bv[u][j] = AsBf16(_mm512_loadu_si512(b + j * panel_bytes + (pair + u) * 64));
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const __m512bh av = Pair(a[i] + 2 * (pair + u));
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], bv[u][j], av);
    }
  }
}

template <int M, int N>
void GemmBlock(const GemmArgs& g, int32_t row, int32_t panel) {
  constexpr int U = N >= 3 ? 1 : 4 / N;
  const uint8_t* b = static_cast<const uint8_t*>(g.b) + panel * g.panel_bytes;
  const uint16_t* a[M];
  __m512 sum[M][N];
  float* c = g.c + row * g.ldc + panel * kPanel;
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
    a[i] = static_cast<const uint16_t*>(g.a_rows[row + i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      sum[i][j] = g.accumulate ? _mm512_loadu_ps(c + i * g.ldc + j * kPanel) : _mm512_setzero_ps();
    }
  }
  const int32_t pairs = g.k / 2;
  int32_t pair = 0;
  for (; pair + U <= pairs; pair += U) DotPairs<M, N, U>(a, pair, b, g.panel_bytes, sum);
  for (; pair < pairs; ++pair) DotPairs<M, N, 1>(a, pair, b, g.panel_bytes, sum);
  if (g.k % 2 != 0) {  // half a pair: what lies after the row may be anything
    uint16_t last[M][2];
    const uint16_t* tail[M];
    for (int i = 0; i < M; ++i) {
      last[i][0] = a[i][g.k - 1];
      last[i][1] = 0;
      tail[i] = last[i];
    }
    DotPairs<M, N, 1>(tail, 0, b + pairs * 64, g.panel_bytes, sum);
  }
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) _mm512_storeu_ps(c + i * g.ldc + j * kPanel, sum[i][j]);
  }
}

template <int M, int N>
void AccumulateBlock(const AccumulateArgs& g, int32_t packed, int32_t panel) {
  const uint8_t* v = static_cast<const uint8_t*>(g.v) + panel * g.ldv;
  const uint16_t* p = static_cast<const uint16_t*>(g.p) + 2 * packed;
  float* o = g.o + packed * g.ldo + panel * kPanel;
  __m512 sum[M][N];
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      sum[i][j] = g.alpha == nullptr ? _mm512_setzero_ps()
                                     : _mm512_mul_ps(_mm512_loadu_ps(o + i * g.ldo + j * kPanel),
                                                     _mm512_set1_ps(g.alpha[packed + i]));
    }
  }
  const int32_t pairs = (g.rows + 1) / 2;
  for (int32_t pair = 0; pair < pairs; ++pair, p += 2 * g.columns, v += 64) {
    __m512bh bv[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) bv[j] = AsBf16(_mm512_loadu_si512(v + j * g.ldv));
#pragma GCC unroll 32
    for (int i = 0; i < M; ++i) {
      const __m512bh av = Pair(p + 2 * i);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], bv[j], av);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) _mm512_storeu_ps(o + i * g.ldo + j * kPanel, sum[i][j]);
  }
}

template <typename Args>
using Block = void (*)(const Args&, int32_t, int32_t);

// Block functions of 1 .. kAccumulators / N rows.
template <int N, int... kRows>
struct Blocks {
  static constexpr Block<GemmArgs> kGemm[] = {nullptr, GemmBlock<kRows, N>...};
  static constexpr Block<AccumulateArgs> kAccumulate[] = {nullptr, AccumulateBlock<kRows, N>...};
};
using Blocks4 = Blocks<4, 1, 2, 3, 4, 5, 6>;
using Blocks3 = Blocks<3, 1, 2, 3, 4, 5, 6, 7, 8>;
using Blocks2 = Blocks<2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;
using Blocks1 = Blocks<1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                       22, 23, 24>;

// `rows` in blocks of nearly equal size, none above the accumulators' number.
template <typename Args>
void RowBlocks(const Args& args, const Block<Args>* blocks, int32_t limit, int32_t rows,
               int32_t panel) {
  const int32_t count = (rows + limit - 1) / limit;
  for (int32_t i = 0, row = 0; i < count; ++i) {
    const int32_t end = static_cast<int32_t>(static_cast<int64_t>(rows) * (i + 1) / count);
    blocks[end - row](args, row, panel);
    row = end;
  }
}

template <typename Args>
void Panels(const Args& args, int32_t rows, const Block<Args>* const (&blocks)[5]) {
  for (int32_t panel = 0; panel < args.panels;) {
    const int32_t left = args.panels - panel;
    const int32_t wide = left >= 4 ? (left == 5 ? 3 : 4) : left;
    RowBlocks(args, blocks[wide], kAccumulators / wide, rows, panel);
    panel += wide;
  }
}

void Gemm(const GemmArgs& args) {
  constexpr const Block<GemmArgs>* kBlocks[5] = {nullptr, Blocks1::kGemm, Blocks2::kGemm,
                                                 Blocks3::kGemm, Blocks4::kGemm};
  Panels(args, args.rows, kBlocks);
}

void Accumulate(const AccumulateArgs& args) {
  constexpr const Block<AccumulateArgs>* kBlocks[5] = {nullptr, Blocks1::kAccumulate,
                                                       Blocks2::kAccumulate, Blocks3::kAccumulate,
                                                       Blocks4::kAccumulate};
  Panels(args, args.packed_rows, kBlocks);
}

// p: bf16 pairs [ceil(rows / 2)][columns][2].
template <bool kRest>
void SoftmaxColumns(const SoftmaxArgs& args) {
  for (int32_t n = 0; n < args.columns; n += kPanel) {
    ColumnState state = BeginColumns(args, n);
    uint16_t* p = static_cast<uint16_t*>(args.p) + 2 * n;
    uint16_t* p_rest = kRest ? static_cast<uint16_t*>(args.p_rest) + 2 * n : nullptr;
    for (int32_t r = 0; r < args.rows; r += 2, p += 2 * args.columns) {
      __m512i rest;
      _mm512_storeu_si512(p, ProbabilityPairs<kRest>(args, state, r, n, &rest));
      if constexpr (kRest) {
        _mm512_storeu_si512(p_rest, rest);
        p_rest += 2 * args.columns;
      }
    }
    EndColumns(args, state, n);
  }
}

void Softmax(const SoftmaxArgs& args) {
  if (args.p_rest != nullptr) {
    SoftmaxColumns<true>(args);
  } else {
    SoftmaxColumns<false>(args);
  }
}

float Probability(const SoftmaxArgs& args, int32_t row, int32_t column) {
  const int64_t pair = static_cast<int64_t>(row / 2) * args.columns + column;
  return FromBf16(static_cast<const uint16_t*>(args.p)[2 * pair + row % 2]);
}

}  // namespace

const KernelSet kAvx512Bf16Kernels = {
    /*name=*/"avx512_bf16",
    /*bf16_operands=*/true,
    /*k_align=*/2,
    Gemm,
    Softmax,
    Accumulate,
    Probability,
    PackValues,
    Widen,
    Narrow,
    PackRows<2>,
    Scale,
    ScaleNarrow,
    AddScaled,
    /*enter_thread=*/nullptr,
    /*leave_thread=*/nullptr,
};

}  // namespace mla::kernels::cpu
