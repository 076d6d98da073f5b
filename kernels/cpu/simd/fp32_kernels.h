// Implements the inner loops with fp32 operands once, over the compiler's vector types.
//
// Each source of levels/ that multiplies fp32 (portable, avx2, avx512) includes this file. Before
// that it defines MLA_LANES (floats a vector register holds: 4, 8 or 16) and MLA_ACCUMULATORS
// (vector registers to accumulate in). It is compiled with its level's options. Everything is in an
// unnamed namespace, so that no code compiled for one level can be linked into another.
#ifndef MLA_KERNELS_CPU_SIMD_FP32_KERNELS_H_
#define MLA_KERNELS_CPU_SIMD_FP32_KERNELS_H_

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/simd/exp2.h"
#include "kernels/cpu/simd/kernel_set.h"

namespace mla::kernels::cpu {
namespace {

constexpr int kVectors = kPanel / MLA_LANES;  // vectors a panel

inline VecF Load(const float* from) {
  VecF v;
  memcpy(&v, from, sizeof v);
  return v;
}

inline void Store(float* to, VecF v) { memcpy(to, &v, sizeof v); }

// Adds the products of `M` rows of A and `N` panels of B to `sum`. A element (i, k) is a[i][k] in
// the row form and a[0][k * lda + i] in the column form.
template <int M, int N, bool kColumns>
inline void Product(const float* const* a, int64_t lda, int32_t k, const float* b, int64_t ldb,
                    int64_t panel, VecF (&sum)[M][N * kVectors]) {
  for (int32_t kk = 0; kk < k; ++kk) {
    VecF bv[N * kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < N * kVectors; ++j) {
      bv[j] = Load(b + kk * ldb + (j / kVectors) * panel + (j % kVectors) * MLA_LANES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const VecF av = Splat(kColumns ? a[0][kk * lda + i] : a[i][kk]);
#pragma GCC unroll 16
      for (int j = 0; j < N * kVectors; ++j) sum[i][j] += av * bv[j];
    }
  }
}

template <int M, int N>
void GemmBlock(const GemmArgs& g, int32_t row, int32_t panel) {
  const int64_t panel_floats = g.panel_bytes / 4;
  const float* b = static_cast<const float*>(g.b) + panel * panel_floats;
  const float* a[M];
  for (int i = 0; i < M; ++i) a[i] = static_cast<const float*>(g.a_rows[row + i]);
  VecF sum[M][N * kVectors];
  float* c = g.c + row * g.ldc + panel * kPanel;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < N * kVectors; ++j) {
      sum[i][j] = g.accumulate ? Load(c + i * g.ldc + j * MLA_LANES) : Splat(0.0f);
    }
  }
  Product<M, N, false>(a, 0, g.k, b, kPanel, panel_floats, sum);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < N * kVectors; ++j) Store(c + i * g.ldc + j * MLA_LANES, sum[i][j]);
  }
}

template <int M, int N>
void AccumulateBlock(const AccumulateArgs& g, int32_t packed, int32_t panel) {
  const float* p = static_cast<const float*>(g.p) + packed;
  const float* v = static_cast<const float*>(g.v) + panel * kPanel;
  float* o = g.o + packed * g.ldo + panel * kPanel;
  VecF sum[M][N * kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    const VecF alpha = Splat(g.alpha != nullptr ? g.alpha[packed + i] : 0.0f);
#pragma GCC unroll 16
    for (int j = 0; j < N * kVectors; ++j) {
      sum[i][j] = g.alpha != nullptr ? Load(o + i * g.ldo + j * MLA_LANES) * alpha : Splat(0.0f);
    }
  }
  Product<M, N, true>(&p, g.columns, g.rows, v, g.ldv, kPanel, sum);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < N * kVectors; ++j) Store(o + i * g.ldo + j * MLA_LANES, sum[i][j]);
  }
}

// Products take kWide panels at once if registers allow, and as many rows as fill the accumulators.
constexpr int kWide = MLA_ACCUMULATORS / kVectors >= 24 ? 4 : 1;
constexpr int kRowsWide = MLA_ACCUMULATORS / (kWide * kVectors);
constexpr int kRowsNarrow = MLA_ACCUMULATORS / kVectors > 12 ? 12 : MLA_ACCUMULATORS / kVectors;

template <int N, typename Args>
using BlockFunction = void (*)(const Args&, int32_t, int32_t);

// Runs Block<M, N> for row counts that need not be a multiple of M.
#define MLA_ROW_BLOCKS(Name, Args, Block)                                       \
  template <int M, int N>                                                       \
  void Name(const Args& args, int32_t row, int32_t rows, int32_t panel) {       \
    for (; row + M <= rows; row += M) Block<M, N>(args, row, panel);            \
    if constexpr (M > 1) {                                                      \
      if (row < rows) Name<(M > 4 ? M / 2 : M - 1), N>(args, row, rows, panel); \
    }                                                                           \
  }
MLA_ROW_BLOCKS(GemmRows, GemmArgs, GemmBlock)
MLA_ROW_BLOCKS(AccumulateRows, AccumulateArgs, AccumulateBlock)
#undef MLA_ROW_BLOCKS

void Gemm(const GemmArgs& args) {
  int32_t panel = 0;
  if constexpr (kWide > 1) {
    for (; panel + kWide <= args.panels; panel += kWide) {
      GemmRows<kRowsWide, kWide>(args, 0, args.rows, panel);
    }
  }
  for (; panel < args.panels; ++panel) GemmRows<kRowsNarrow, 1>(args, 0, args.rows, panel);
}

void Accumulate(const AccumulateArgs& args) {
  int32_t panel = 0;
  if constexpr (kWide > 1) {
    for (; panel + kWide <= args.panels; panel += kWide) {
      AccumulateRows<kRowsWide, kWide>(args, 0, args.packed_rows, panel);
    }
  }
  for (; panel < args.panels; ++panel) {
    AccumulateRows<kRowsNarrow, 1>(args, 0, args.packed_rows, panel);
  }
}

// p is fp32 [rows][columns].
void Softmax(const SoftmaxArgs& args) {
  for (int32_t n = 0; n < args.columns; n += MLA_LANES) {
    VecI visible = {};
    if (args.visible != nullptr) memcpy(&visible, args.visible + n, sizeof visible);
    const auto logit = [&](int32_t r) {
      const VecF x = Load(args.s + r * args.lds + n) * args.scale2;
      if (args.visible == nullptr) return x;
      return visible > r ? x : Splat(-__builtin_inff());
    };
    const VecF m_old = Load(args.m + n);
    VecF m = m_old;
    for (int32_t r = 0; r < args.rows; ++r) {
      const VecF x = logit(r);
      m = x > m ? x : m;
    }
    // A column that has seen no logit shifts by 0, so that -inf - m stays -inf.
    const VecF shift = m == -__builtin_inff() ? Splat(0.0f) : m;
    const VecF alpha = Exp2(m_old - shift);
    VecF sum = Load(args.l + n) * alpha;
    float* p = static_cast<float*>(args.p) + n;
    for (int32_t r = 0; r < args.rows; ++r, p += args.columns) {
      const VecF e = Exp2(logit(r) - shift);
      sum += e;
      Store(p, e);
    }
    Store(args.m + n, m);
    Store(args.l + n, sum);
    Store(args.alpha + n, alpha);
  }
}

float Probability(const SoftmaxArgs& args, int32_t row, int32_t column) {
  return static_cast<const float*>(args.p)[static_cast<int64_t>(row) * args.columns + column];
}

inline float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

void Widen(const uint16_t* const* rows, int32_t count, int32_t dim, float* out, int64_t ld) {
  const int32_t padded = (dim + kPanel - 1) / kPanel * kPanel;
  for (int32_t r = 0; r < count; ++r, out += ld) {
    const uint16_t* row = rows[r];
    for (int32_t i = 0; i < dim; ++i) out[i] = FromBf16(row[i]);
    for (int32_t i = dim; i < padded; ++i) out[i] = 0.0f;
  }
}

inline uint16_t ToBf16Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

void Narrow(const float* in, int64_t ld_in, int32_t count, int32_t dim, uint16_t* out,
            int64_t ld_out) {
  for (int32_t r = 0; r < count; ++r, in += ld_in, out += ld_out) {
    for (int32_t i = 0; i < dim; ++i) out[i] = ToBf16Bits(in[i]);
  }
}

// SumOfRows adds weighted rows for kSumColumns columns at a time, in registers.
constexpr int32_t kSumColumns = 4 * MLA_LANES;

inline void SumOfRows(const float* const* rows, const float* weights, int32_t count, int32_t i,
                      int32_t width, float* sum) {
  for (int32_t c = 0; c < kSumColumns; ++c) sum[c] = 0.0f;
  for (int32_t j = 0; j < count; ++j) {
    const float* row = rows[j] + i;
    if (width == kSumColumns) {
      for (int32_t c = 0; c < kSumColumns; ++c) sum[c] += row[c] * weights[j];
    } else {
      for (int32_t c = 0; c < width; ++c) sum[c] += row[c] * weights[j];
    }
  }
}

template <typename Store>
inline void ForEachSum(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                       const Store& store) {
  for (int32_t i = 0; i < dim; i += kSumColumns) {
    float sum[kSumColumns];
    const int32_t width = dim - i < kSumColumns ? dim - i : kSumColumns;
    SumOfRows(rows, weights, count, i, width, sum);
    for (int32_t c = 0; c < width; ++c) store(i + c, sum[c]);
  }
}

void WeightedSum(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                 float* out) {
  ForEachSum(rows, weights, count, dim, [out](int32_t i, float value) { out[i] = value; });
}

void WeightedSumNarrow(const float* const* rows, const float* weights, int32_t count, int32_t dim,
                       uint16_t* out) {
  ForEachSum(rows, weights, count, dim,
             [out](int32_t i, float value) { out[i] = ToBf16Bits(value); });
}

// Returns the level's table. It is constexpr, so that no code of the level runs before the level is
// chosen.
constexpr KernelSet Fp32KernelSet(const char* name, void (*widen_fp8)(const Fp8RowsArgs&)) {
  return {
      name,
      /*bf16_operands=*/false,
      /*k_align=*/1,
      /*k_group=*/1,
      /*fetches_listed_rows=*/false,
      /*packs_in_gemm=*/0,
      Gemm,
      Softmax,
      Accumulate,
      Probability,
      /*pack_values=*/nullptr,
      Widen,
      widen_fp8,
      Narrow,
      /*split=*/nullptr,
      /*pack_rows=*/nullptr,
      WeightedSum,
      WeightedSumNarrow,
      /*enter_thread=*/nullptr,
      /*leave_thread=*/nullptr,
  };
}

}  // namespace

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_FP32_KERNELS_H_
