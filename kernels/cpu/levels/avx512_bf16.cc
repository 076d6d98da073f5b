#include "kernels/cpu/simd/bf16_common.h"
#include "kernels/cpu/simd/fp8_avx512.h"

namespace mla::kernels::cpu {
namespace {

constexpr int kAccumulators = 24;

inline __m512bh Pair(const uint16_t* from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  return AsBf16(_mm512_set1_epi32(pair));
}

constexpr int32_t kGroup = 8;         // elements of k in a 128-bit lane
constexpr int64_t kGroupBytes = 256;  // bytes of a group, all 16 columns
constexpr int32_t kGemmRows = 6;      // 24 accumulators, 4 vectors of B, 1 of A
constexpr int kPrefetchLines = 2;     // a step of at most 24 products

// Sums the 4 pairs of each lane: lane g of vector j holds column 4 g + j.
inline __m512 SumLanes(const __m512 (&sum)[4]) {
  __m512 half[2];
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const __m512i a = _mm512_castps_si512(sum[2 * j]), b = _mm512_castps_si512(sum[2 * j + 1]);
    half[j] = _mm512_add_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi32(a, b)),
                            _mm512_castsi512_ps(_mm512_unpackhi_epi32(a, b)));
  }
  const __m512i a = _mm512_castps_si512(half[0]), b = _mm512_castps_si512(half[1]);
  return _mm512_add_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi64(a, b)),
                       _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, b)));
}

// Multiplies eight elements of each of M rows with the same eight of 16 columns.
template <int M>
inline void DotGroup(const uint16_t* const (&a)[M], int64_t offset, const uint8_t* b,
                     __m512 (&sum)[M][4]) {
  __m512bh bv[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) bv[j] = AsBf16(_mm512_loadu_si512(b + j * 64));
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    const __m512bh av = AsBf16(
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a[i] + offset))));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], bv[j], av);
  }
}

// Multiplies M rows with one panel.
template <int M>
void GemmBlock(const GemmArgs& g, int32_t row, int32_t panel, Prefetcher* next) {
  const uint8_t* b = static_cast<const uint8_t*>(g.b) + panel * g.panel_bytes;
  const uint16_t* a[M];
  __m512 sum[M][4];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    a[i] = static_cast<const uint16_t*>(g.a_rows[row + i]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_ps();
  }
  const int64_t whole = g.k / kGroup * kGroup;
  Prefetcher prefetcher = *next;
  for (int64_t at = 0; at < whole; at += kGroup, b += kGroupBytes) {
    DotGroup<M>(a, at, b, sum);
    prefetcher.Step(kPrefetchLines);
  }
  *next = prefetcher;
  if (whole < g.k) {  // bytes after the row may hold anything
    uint16_t last[M][kGroup] = {};
    const uint16_t* tail[M];
    for (int i = 0; i < M; ++i) {
      memcpy(last[i], a[i] + whole, static_cast<size_t>(g.k - whole) * 2);
      tail[i] = last[i];
    }
    DotGroup<M>(tail, 0, b, sum);
  }
  float* c = g.c + row * g.ldc + panel * kPanel;
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i, c += g.ldc) {
    __m512 of_row = SumLanes(sum[i]);
    if (g.accumulate) of_row = _mm512_add_ps(of_row, _mm512_loadu_ps(c));
    _mm512_storeu_ps(c, of_row);
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

using GemmFunction = void (*)(const GemmArgs&, int32_t, int32_t, Prefetcher*);
constexpr GemmFunction kGemmBlocks[] = {nullptr,      GemmBlock<1>, GemmBlock<2>, GemmBlock<3>,
                                        GemmBlock<4>, GemmBlock<5>, GemmBlock<6>};

using AccumulateFunction = void (*)(const AccumulateArgs&, int32_t, int32_t);

// Block functions of 1 .. kAccumulators / N rows.
template <int N, int... kRows>
constexpr AccumulateFunction kAccumulateBlocks[] = {nullptr, AccumulateBlock<kRows, N>...};
constexpr const AccumulateFunction* kBlocks4 = kAccumulateBlocks<4, 1, 2, 3, 4, 5, 6>;
constexpr const AccumulateFunction* kBlocks3 = kAccumulateBlocks<3, 1, 2, 3, 4, 5, 6, 7, 8>;
constexpr const AccumulateFunction* kBlocks2 =
    kAccumulateBlocks<2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>;
constexpr const AccumulateFunction* kBlocks1 =
    kAccumulateBlocks<1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                      22, 23, 24>;

// End of block `i` when `rows` are cut into `count` blocks of nearly equal size.
int32_t BlockEnd(int32_t rows, int32_t i, int32_t count) {
  return static_cast<int32_t>(static_cast<int64_t>(rows) * (i + 1) / count);
}

// One panel stays in the first-level cache while it is multiplied with all rows.
void Gemm(const GemmArgs& args) {
  Prefetcher next(args);
  const int32_t count = (args.rows + kGemmRows - 1) / kGemmRows;
  for (int32_t panel = 0; panel < args.panels; ++panel) {
    for (int32_t i = 0, row = 0; i < count; ++i) {
      const int32_t end = BlockEnd(args.rows, i, count);
      kGemmBlocks[end - row](args, row, panel, &next);
      row = end;
    }
  }
}

void Accumulate(const AccumulateArgs& args) {
  constexpr const AccumulateFunction* kBlocks[5] = {nullptr, kBlocks1, kBlocks2, kBlocks3,
                                                    kBlocks4};
  for (int32_t panel = 0; panel < args.panels;) {
    const int32_t left = args.panels - panel;
    const int32_t wide = left >= 4 ? (left == 5 ? 3 : 4) : left;
    const int32_t limit = kAccumulators / wide;
    const int32_t count = (args.packed_rows + limit - 1) / limit;
    for (int32_t i = 0, row = 0; i < count; ++i) {
      const int32_t end = BlockEnd(args.packed_rows, i, count);
      kBlocks[wide][end - row](args, row, panel);
      row = end;
    }
    panel += wide;
  }
}

// Groups of 8 k of column n go to the lanes that the product reads.
void PackRows(const uint16_t* const* rows, int32_t count, int32_t k, uint16_t* panel) {
  for (int32_t begin = 0; begin < k; begin += kGroup, panel += kGroupBytes / 2) {
    const int32_t rest = k - begin < kGroup ? k - begin : kGroup;
    for (int32_t n = 0; n < kPanel; ++n) {
      uint16_t lane[kGroup] = {};
      if (n < count) {
        if (rest == kGroup) {
          memcpy(lane, rows[n] + begin, sizeof lane);
        } else {
          memcpy(lane, rows[n] + begin, static_cast<size_t>(rest) * 2);
        }
      }
      memcpy(panel + n % 4 * 32 + n / 4 * 8, lane, sizeof lane);
    }
  }
}

// Stores p as bf16 pairs [ceil(rows / 2)][columns][2].
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
    /*k_align=*/8,
    /*k_group=*/8,
    /*fetches_listed_rows=*/true,
    /*packs_in_gemm=*/0,
    Gemm,
    Softmax,
    Accumulate,
    Probability,
    PackValues,
    Widen,
    WidenFp8,
    Narrow,
    Split,
    PackRows,
    WeightedSum,
    WeightedSumNarrow,
    /*enter_thread=*/nullptr,
    /*leave_thread=*/nullptr,
};

}  // namespace mla::kernels::cpu
