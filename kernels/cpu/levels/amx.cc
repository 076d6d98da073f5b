#include "kernels/cpu/simd/amx_accumulate.h"
#include "kernels/cpu/simd/amx_attend.h"
#include "kernels/cpu/simd/amx_softmax.h"
#include "kernels/cpu/simd/amx_tiles.h"
#include "kernels/cpu/simd/bf16_common.h"
#include "kernels/cpu/simd/fp8_vbmi.h"

namespace mla::kernels::cpu {
namespace {

constexpr int32_t kStageDepth = 1024;
// A cache line is added, because strides of whole kilobytes map lines that are used together to few
// cache sets.
constexpr int32_t kStageRow = kStageDepth + 32;
constexpr int32_t kFewPanels = 2;  // products of at most this many panels copy rows one step of k
                                   // at a time

void EnterThread() {
  static const TileConfig config;
  FinishStores();
  _tile_loadconfig(&config);
}

void LeaveThread() { _tile_release(); }

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
void GemmRows(const GemmArgs& g, int32_t row, int32_t count, bool in_place, FetchWork& fetch) {
  alignas(64) uint16_t stage[kA * kRows][kStageRow];
  // The copy has a bounded depth, so deeper products accumulate through C.
  for (int32_t begin = 0; begin < g.k; begin += kStageDepth) {
    const int32_t depth = g.k - begin < kStageDepth ? g.k - begin : kStageDepth;
    const int32_t steps = (depth + kDepth - 1) / kDepth;
    TileOperands of;
    if (in_place) {
      const auto* first = static_cast<const uint8_t*>(g.a_rows[row]);
      of.stride_a = static_cast<const uint8_t*>(g.a_rows[row + 1]) - first;
      of.a[0] = first + begin * 2;
      of.a[1] = static_cast<const uint8_t*>(g.a_rows[row + (kA - 1) * kRows]) + begin * 2;
    } else {
      CopyRows(g, row, count, kA * kRows, begin, depth, stage);
      of.stride_a = kStageRow * 2;
      of.a[0] = reinterpret_cast<const uint8_t*>(stage[0]);
      of.a[1] = reinterpret_cast<const uint8_t*>(stage[(kA - 1) * kRows]);
    }
    of.panel_bytes = g.panel_bytes;
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
      of.b = b + panel * g.panel_bytes;
      Multiply<kA, 2>(of, steps, fetch);
      StoreTiles<kA, 2>(c + panel * kPanel, g.ldc);
    }
    if (panel == g.panels) continue;
    if (load) {
      LoadTiles<kA, 1>(c + panel * kPanel, g.ldc);
    } else {
      ZeroTiles<kA, 1>();
    }
    of.b = b + panel * g.panel_bytes;
    Multiply<kA, 1>(of, steps, fetch);
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
  for (int32_t i = (count + 1) / 2; i < kTwoBlocks / 2; ++i, out += 64) {
    _mm512_storeu_si512(out, _mm512_setzero_si512());
    _mm512_storeu_si512(out + g.value_panel_bytes, _mm512_setzero_si512());
  }
}

// Products of few panels with scattered rows copy one step of k of all rows at a time, so that the
// copy stays in the first-level cache together with B. A tile load waits until the lines that it
// reads have left the store buffer. A step is therefore copied while the previous one is
// multiplied.
template <int kB>
void GemmCopied(const GemmArgs& g, int32_t row, int32_t count, FetchWork& fetch) {
  alignas(64) uint16_t stage[2][kTwoBlocks][kDepth];
  for (int32_t i = count; i < kTwoBlocks; ++i) {
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
    Multiply<2, kB>({{a, a + kRows * kDepth * 2}, kDepth * 2, b, g.panel_bytes}, 1, fetch);
  }
  if (one) {
    StoreTiles<1, kB>(c, g.ldc);
  } else {
    StoreTiles<2, kB>(c, g.ldc);
  }
}

void Gemm(const GemmArgs& args) {
  Prefetcher next(args);
  FetchWork fetch{next, kPrefetchLines};
  for (int32_t row = 0; row < args.rows; row += kTwoBlocks) {
    const int32_t left = args.rows - row;
    const int32_t count = left < kTwoBlocks ? left : kTwoBlocks;
    const bool in_place =
        args.value_panels == nullptr && args.k % kDepth == 0 && Even(args.a_rows + row, count);
    if (!in_place && args.panels == 1) {
      GemmCopied<1>(args, row, count, fetch);
    } else if (!in_place && args.panels == 2) {
      GemmCopied<2>(args, row, count, fetch);
    } else if (count > kRows) {
      GemmRows<2>(args, row, count, in_place, fetch);
    } else {
      GemmRows<1>(args, row, count, in_place, fetch);
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

// The stages one after the other do the same additions in the same order, so that outputs do not
// depend on where pages lie.
void Attend(const TileArgs& args) {
  GemmArgs gemm = args.gemm;
  if (WholeBlocks(gemm)) {
    AttendWholeBlocks(args);
    return;
  }
  if (gemm.value_panels != nullptr) {
    PackPaddedValues(reinterpret_cast<const uint16_t* const*>(gemm.a_rows), gemm.rows,
                     gemm.value_dim, gemm.value_panels, gemm.value_panel_bytes);
    gemm.value_panels = nullptr;
  }
  Gemm(gemm);
  Softmax(args.softmax);
  Accumulate(args.accumulate);
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
    Attend,
    /*kv_rows=*/kMostKvRows,
};

}  // namespace mla::kernels::cpu
