#include "kernels/cpu/simd/bf16_common.h"
#include "kernels/cpu/simd/fp8_vbmi.h"

namespace mla::kernels::cpu {
namespace {

// Tile registers: 0-3 accumulate (16 rows x 16 fp32), 4-5 hold A (16 rows x 32 bf16), 6-7 hold B
// (16 pairs of k x 16 columns x 2 bf16). All are configured at full size; edges are padded with
// zeros in memory instead.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int32_t kRows = 16;   // rows of a tile
constexpr int32_t kDepth = 32;  // k of a tile
constexpr int32_t kStageDepth = 1024;
// A cache line is added, because strides of whole kilobytes map lines that are used together to few
// cache sets.
constexpr int32_t kStageRow = kStageDepth + 32;
constexpr int32_t kFewPanels = 2;  // products of at most this many panels copy rows one step of k
                                   // at a time
constexpr int32_t kCopied = 2 * kRows;
constexpr int kPrefetchLines = 4;  // a step of at most four tile products

// The compiler's tile intrinsics do not declare which memory they read. This barrier makes earlier
// stores reach memory before they run, and keeps them from being dropped as dead.
inline void FinishStores() { asm volatile("" : : : "memory"); }

void EnterThread() {
  static const TileConfig config;
  FinishStores();
  _tile_loadconfig(&config);
}

void LeaveThread() { _tile_release(); }

// Zeroes up to 2 x 2 accumulator tiles. kA and kB count the row blocks and panels in use.
template <int kA, int kB>
inline void ZeroTiles() {
  _tile_zero(0);
  if constexpr (kB == 2) _tile_zero(1);
  if constexpr (kA == 2) _tile_zero(2);
  if constexpr (kA == 2 && kB == 2) _tile_zero(3);
}

template <int kA, int kB>
inline void LoadTiles(const float* c, int64_t ldc) {
  const int64_t stride = ldc * 4;
  _tile_loadd(0, c, stride);
  if constexpr (kB == 2) _tile_loadd(1, c + kPanel, stride);
  if constexpr (kA == 2) _tile_loadd(2, c + kRows * ldc, stride);
  if constexpr (kA == 2 && kB == 2) _tile_loadd(3, c + kRows * ldc + kPanel, stride);
}

template <int kA, int kB>
inline void StoreTiles(float* c, int64_t ldc) {
  const int64_t stride = ldc * 4;
  _tile_stored(0, c, stride);
  if constexpr (kB == 2) _tile_stored(1, c + kPanel, stride);
  if constexpr (kA == 2) _tile_stored(2, c + kRows * ldc, stride);
  if constexpr (kA == 2 && kB == 2) _tile_stored(3, c + kRows * ldc + kPanel, stride);
}

// Multiplies over steps x 32 of k. A rows lie stride_a bytes apart, the second block of them at a1.
template <int kA, int kB>
inline void Multiply(const uint8_t* a0, const uint8_t* a1, int64_t stride_a, const uint8_t* b,
                     int64_t panel_bytes, int32_t steps, Prefetcher* next = nullptr) {
  for (int32_t step = 0; step < steps; ++step, a0 += 64, a1 += 64, b += 1024) {
    if (next != nullptr) next->Step(kPrefetchLines);
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a0, stride_a);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kB == 2) {
      _tile_loadd(7, b + panel_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kA == 2) {
      _tile_loadd(5, a1, stride_a);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kB == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// An A operand of up to 32 rows.
struct Operand {
  const uint8_t* rows[2];
  int64_t stride;
};

inline bool Even(const void* const* rows, int32_t count) {
  if (count < kRows || count % kRows != 0) return false;
  const auto* first = static_cast<const uint8_t*>(rows[0]);
  const int64_t stride = static_cast<const uint8_t*>(rows[1]) - first;
  for (int32_t block = 0; block < count; block += kRows) {
    const auto* start = static_cast<const uint8_t*>(rows[block]);
    for (int32_t i = 1; i < kRows; ++i) {
      if (static_cast<const uint8_t*>(rows[block + i]) - start != i * stride) return false;
    }
  }
  return true;
}

// Copies elements [begin, begin + depth) of rows that are not evenly spaced, padded to whole tiles.
void CopyRows(const GemmArgs& g, int32_t row, int32_t count, int32_t padded, int32_t begin,
              int32_t depth, uint16_t (*stage)[kStageRow]) {
  const int32_t whole = depth / kDepth * kDepth;
  for (int32_t i = 0; i < padded; ++i) {
    const bool real = i < count;
    const auto* const from = static_cast<const uint16_t*>(g.a_rows[row + (real ? i : 0)]) + begin;
    int32_t k = 0;
    for (; real && k < whole; k += kDepth) {
      _mm512_storeu_si512(stage[i] + k, _mm512_loadu_si512(from + k));
    }
    for (; k < depth; k += kDepth) {
      const __mmask32 mask = real ? Mask32(depth - k) : 0;
      _mm512_storeu_si512(stage[i] + k, _mm512_maskz_loadu_epi16(mask, from + k));
    }
  }
}

// `in_place`: the rows are evenly spaced, and k is a multiple of the tile depth.
template <int kA>
void GemmRows(const GemmArgs& g, int32_t row, int32_t count, bool in_place, Prefetcher* next) {
  alignas(64) uint16_t stage[kA * kRows][kStageRow];
  // The copy has a bounded depth, so deeper products accumulate through C.
  for (int32_t begin = 0; begin < g.k; begin += kStageDepth) {
    const int32_t depth = g.k - begin < kStageDepth ? g.k - begin : kStageDepth;
    const int32_t steps = (depth + kDepth - 1) / kDepth;
    Operand a;
    if (in_place) {
      const auto* first = static_cast<const uint8_t*>(g.a_rows[row]);
      a.stride = static_cast<const uint8_t*>(g.a_rows[row + 1]) - first;
      a.rows[0] = first + begin * 2;
      a.rows[1] = static_cast<const uint8_t*>(g.a_rows[row + (kA - 1) * kRows]) + begin * 2;
    } else {
      CopyRows(g, row, count, kA * kRows, begin, depth, stage);
      a.stride = kStageRow * 2;
      a.rows[0] = reinterpret_cast<const uint8_t*>(stage[0]);
      a.rows[1] = reinterpret_cast<const uint8_t*>(stage[(kA - 1) * kRows]);
    }
    FinishStores();
    const bool load = g.accumulate || begin > 0;
    const uint8_t* b = static_cast<const uint8_t*>(g.b) + begin * 32;
    float* c = g.c + row * g.ldc;
    int32_t panel = 0;
    for (; panel + 2 <= g.panels; panel += 2) {
      if (load) {
        LoadTiles<kA, 2>(c + panel * kPanel, g.ldc);
      } else {
        ZeroTiles<kA, 2>();
      }
      Multiply<kA, 2>(a.rows[0], a.rows[1], a.stride, b + panel * g.panel_bytes, g.panel_bytes,
                      steps, next);
      StoreTiles<kA, 2>(c + panel * kPanel, g.ldc);
    }
    if (panel == g.panels) continue;
    if (load) {
      LoadTiles<kA, 1>(c + panel * kPanel, g.ldc);
    } else {
      ZeroTiles<kA, 1>();
    }
    Multiply<kA, 1>(a.rows[0], a.rows[1], a.stride, b + panel * g.panel_bytes, g.panel_bytes, steps,
                    next);
    StoreTiles<kA, 1>(c + panel * kPanel, g.ldc);
  }
}

// Copies elements [k, k + kDepth) of `count` rows, and writes their pairs to the value panels.
void CopyStep(const GemmArgs& g, int32_t row, int32_t count, int32_t k, uint16_t (*to)[kDepth]) {
  const auto* const rows = reinterpret_cast<const uint16_t* const*>(g.a_rows) + row;
  const __mmask32 mask = Mask32(g.k - k);
  if (g.value_panels == nullptr || k >= g.value_dim) {
    for (int32_t i = 0; i < count; ++i) {
      _mm512_storeu_si512(to[i], _mm512_maskz_loadu_epi16(mask, rows[i] + k));
    }
    return;
  }
  uint8_t* out = reinterpret_cast<uint8_t*>(g.value_panels) + k / kPanel * g.value_panel_bytes;
  out += row * 32;
  for (int32_t i = 0; i < count; i += 2, out += 64) {
    const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[i] + k);
    __m512i odd = _mm512_setzero_si512();
    if (i + 1 < count) odd = _mm512_maskz_loadu_epi16(mask, rows[i + 1] + k);
    _mm512_storeu_si512(to[i], even);
    _mm512_storeu_si512(to[i + 1], odd);
    const ValuePairs pairs = PairValues(even, odd);
    _mm512_storeu_si512(out, pairs.first);
    _mm512_storeu_si512(out + g.value_panel_bytes, pairs.second);
  }
  for (int32_t i = (count + 1) / 2; i < kCopied / 2; ++i, out += 64) {
    _mm512_storeu_si512(out, _mm512_setzero_si512());
    _mm512_storeu_si512(out + g.value_panel_bytes, _mm512_setzero_si512());
  }
}

// Products of few panels with scattered rows copy one step of k of all rows at a time, so that the
// copy stays in the first-level cache together with B. A tile load waits until the lines that it
// reads have left the store buffer. A step is therefore copied while the previous one is
// multiplied.
template <int kB>
void GemmCopied(const GemmArgs& g, int32_t row, int32_t count, Prefetcher* next) {
  alignas(64) uint16_t stage[2][kCopied][kDepth];
  for (int32_t i = count; i < kCopied; ++i) {
    _mm512_storeu_si512(stage[0][i], _mm512_setzero_si512());
    _mm512_storeu_si512(stage[1][i], _mm512_setzero_si512());
  }
  float* const c = g.c + row * g.ldc;
  const bool one = count <= kRows;  // C has room for one block only
  if (!g.accumulate) {
    ZeroTiles<2, kB>();
  } else if (one) {
    LoadTiles<1, kB>(c, g.ldc);
  } else {
    LoadTiles<2, kB>(c, g.ldc);
  }
  const int32_t steps = (g.k + kDepth - 1) / kDepth;
  const uint8_t* b = static_cast<const uint8_t*>(g.b);
  CopyStep(g, row, count, 0, stage[0]);
  for (int32_t step = 0; step < steps; ++step, b += 1024) {
    if (step + 1 < steps) CopyStep(g, row, count, (step + 1) * kDepth, stage[(step + 1) % 2]);
    FinishStores();
    const auto* const a = reinterpret_cast<const uint8_t*>(stage[step % 2]);
    Multiply<2, kB>(a, a + kRows * kDepth * 2, kDepth * 2, b, g.panel_bytes, 1, next);
  }
  if (one) {
    StoreTiles<1, kB>(c, g.ldc);
  } else {
    StoreTiles<2, kB>(c, g.ldc);
  }
}

void Gemm(const GemmArgs& args) {
  Prefetcher next(args);
  for (int32_t row = 0; row < args.rows; row += kCopied) {
    const int32_t left = args.rows - row;
    const int32_t count = left < kCopied ? left : kCopied;
    const bool in_place =
        args.value_panels == nullptr && args.k % kDepth == 0 && Even(args.a_rows + row, count);
    if (!in_place && args.panels == 1) {
      GemmCopied<1>(args, row, count, &next);
    } else if (!in_place && args.panels == 2) {
      GemmCopied<2>(args, row, count, &next);
    } else if (count > kRows) {
      GemmRows<2>(args, row, count, in_place, &next);
    } else {
      GemmRows<1>(args, row, count, in_place, &next);
    }
  }
}

// Transposes 16 vectors of 16 dwords: t[i][j] becomes t[j][i].
inline void Transpose16(__m512i (&t)[16]) {
  __m512i u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    u[2 * i] = _mm512_unpacklo_epi32(t[2 * i], t[2 * i + 1]);
    u[2 * i + 1] = _mm512_unpackhi_epi32(t[2 * i], t[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[4 * i] = _mm512_unpacklo_epi64(u[4 * i], u[4 * i + 2]);
    t[4 * i + 1] = _mm512_unpackhi_epi64(u[4 * i], u[4 * i + 2]);
    t[4 * i + 2] = _mm512_unpacklo_epi64(u[4 * i + 1], u[4 * i + 3]);
    t[4 * i + 3] = _mm512_unpackhi_epi64(u[4 * i + 1], u[4 * i + 3]);
  }
  // Now lane q of t[4 g + c] holds column 4 q + c of rows 4 g .. 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
    const __m512i e = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
    u[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    u[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
    u[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
    u[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) t[i] = u[i];
}

constexpr int32_t kLdp = kTileRows;  // p: bf16 [columns][kLdp], KV rows padded to 32 with zeros

template <bool kRest>
void SoftmaxColumns(const SoftmaxArgs& args) {
  for (int32_t n = 0; n < args.columns; n += kPanel) {
    ColumnState state = BeginColumns(args, n);
    uint16_t* p = static_cast<uint16_t*>(args.p) + n * kLdp;
    uint16_t* p_rest = kRest ? static_cast<uint16_t*>(args.p_rest) + n * kLdp : nullptr;
    for (int32_t r = 0; r < args.rows; r += kDepth) {
      __m512i pairs[16], rest[16];
      for (int32_t i = 0; i < 16; ++i) {
        pairs[i] = rest[i] = _mm512_setzero_si512();
        if (r + 2 * i >= args.rows) continue;
        pairs[i] = ProbabilityPairs<kRest>(args, state, r + 2 * i, n, &rest[i]);
      }
      Transpose16(pairs);
      for (int32_t i = 0; i < 16; ++i) _mm512_storeu_si512(p + i * kLdp + r, pairs[i]);
      if constexpr (kRest) {
        Transpose16(rest);
        for (int32_t i = 0; i < 16; ++i) _mm512_storeu_si512(p_rest + i * kLdp + r, rest[i]);
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
  return FromBf16(static_cast<const uint16_t*>(args.p)[column * kLdp + row]);
}

// In most tiles the running maximum of most rows does not change, so only the other rows are
// rescaled.
void Rescale(const AccumulateArgs& g) {
  for (int32_t n = 0; n < g.packed_rows; ++n) {
    const float alpha = g.alpha[n];
    if (alpha == 1.0f) continue;
    float* o = g.o + n * g.ldo;
    for (int32_t d = 0; d < g.panels * kPanel; d += kPanel) {
      _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(alpha)));
    }
  }
}

template <int kA>
void AccumulateRows(const AccumulateArgs& g, int32_t row, int32_t steps) {
  const uint8_t* p =
      reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(g.p) + row * kLdp);
  const uint8_t* p1 = p + (kA - 1) * kRows * kLdp * 2;
  const uint8_t* v = static_cast<const uint8_t*>(g.v);
  float* o = g.o + row * g.ldo;
  int32_t panel = 0;
  for (; panel + 2 <= g.panels; panel += 2) {
    if (g.alpha != nullptr) {
      LoadTiles<kA, 2>(o + panel * kPanel, g.ldo);
    } else {
      ZeroTiles<kA, 2>();
    }
    Multiply<kA, 2>(p, p1, kLdp * 2, v + panel * g.ldv, g.ldv, steps);
    StoreTiles<kA, 2>(o + panel * kPanel, g.ldo);
  }
  if (panel == g.panels) return;
  if (g.alpha != nullptr) {
    LoadTiles<kA, 1>(o + panel * kPanel, g.ldo);
  } else {
    ZeroTiles<kA, 1>();
  }
  Multiply<kA, 1>(p, p1, kLdp * 2, v + panel * g.ldv, g.ldv, steps);
  StoreTiles<kA, 1>(o + panel * kPanel, g.ldo);
}

void Accumulate(const AccumulateArgs& args) {
  if (args.alpha != nullptr) Rescale(args);
  FinishStores();
  const int32_t steps = (args.rows + kDepth - 1) / kDepth;
  for (int32_t row = 0; row < args.columns; row += 2 * kRows) {
    if (args.columns - row > kRows) {
      AccumulateRows<2>(args, row, steps);
    } else {
      AccumulateRows<1>(args, row, steps);
    }
  }
}

// Tiles read value panels in whole groups of 32 KV rows, so the last group is padded with zeros.
void PackPaddedValues(const uint16_t* const* rows, int32_t count, int32_t d, uint16_t* panels,
                      int64_t panel_bytes) {
  PackValues(rows, count, d, panels, panel_bytes);
  const int32_t packed = (count + 1) / 2, padded = (count + kDepth - 1) / kDepth * kRows;
  for (int32_t i = 0; i < d; i += kPanel) {
    uint8_t* panel = reinterpret_cast<uint8_t*>(panels) + i / kPanel * panel_bytes;
    for (int32_t pair = packed; pair < padded; ++pair) {
      _mm512_storeu_si512(panel + pair * 64, _mm512_setzero_si512());
    }
  }
}

// Packs 16 rows x 16 pairs of k at a time.
void PackRows(const uint16_t* const* rows, int32_t count, int32_t k, uint16_t* panel) {
  const int32_t padded = (k + kDepth - 1) / kDepth * kDepth;
  for (int32_t i = 0; i < padded; i += 32) {
    __m512i block[16];
    for (int32_t r = 0; r < 16; ++r) {
      block[r] =
          r < count ? _mm512_maskz_loadu_epi16(Mask32(k - i), rows[r] + i) : _mm512_setzero_si512();
    }
    Transpose16(block);
    const int32_t pairs = padded - i < 32 ? (padded - i) / 2 : 16;
    for (int32_t pair = 0; pair < pairs; ++pair) {
      _mm512_storeu_si512(panel + (i / 2 + pair) * 32, block[pair]);
    }
  }
}

}  // namespace

const KernelSet kAmxKernels = {
    /*name=*/"amx",
    /*bf16_operands=*/true,
    /*k_align=*/32,
    /*k_group=*/2,
    /*fetches_listed_rows=*/false,
    /*packs_in_gemm=*/kFewPanels,
    Gemm,
    Softmax,
    Accumulate,
    Probability,
    PackPaddedValues,
    Widen,
    WidenFp8,
    Narrow,
    Split,
    PackRows,
    WeightedSum,
    WeightedSumNarrow,
    EnterThread,
    LeaveThread,
};

}  // namespace mla::kernels::cpu
