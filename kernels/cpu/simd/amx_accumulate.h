// The product of weights and values of the level `amx`. Needs what amx_tiles.h needs. Everything is
// in an unnamed namespace; fp32_kernels.h says why.
#ifndef MLA_KERNELS_CPU_SIMD_AMX_ACCUMULATE_H_
#define MLA_KERNELS_CPU_SIMD_AMX_ACCUMULATE_H_

#include "kernels/cpu/simd/amx_softmax.h"

namespace mla::kernels::cpu {
namespace {

// Rescales the 32 packed rows from `row` on. In most tiles the running maximum of most rows does
// not change, so only the other rows are.
void Rescale(const AccumulateArgs& g, int32_t row) {
  const int32_t end = g.packed_rows - row < kTwoBlocks ? g.packed_rows : row + kTwoBlocks;
  for (int32_t n = row; n < end; ++n) {
    const float alpha = g.alpha[n];
    if (alpha == 1.0f) continue;
    float* o = g.o + n * g.ldo;
    for (int32_t d = 0; d < g.panels * kPanel; d += kPanel) {
      _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(alpha)));
    }
  }
}

template <int kA, int kB, typename Work>
inline void AccumulateBlock(const AccumulateArgs& g, int32_t row, int32_t panel, Work& work) {
  TileOperands of;
  of.a[0] = reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(g.p) + row * kLdp);
  of.a[1] = of.a[0] + (kA - 1) * kRows * kLdp * 2;
  of.stride_a = kLdp * 2;
  of.b = static_cast<const uint8_t*>(g.v) + panel * g.ldv;
  of.panel_bytes = g.ldv;
  float* const o = g.o + row * g.ldo + panel * kPanel;
  const int32_t steps = (g.rows + kDepth - 1) / kDepth;
  if (g.alpha != nullptr) {
    MultiplyInto<kA, kB>(of, o, g.ldo, steps, work);
  } else {
    ZeroTiles<kA, kB>();
    Multiply<kA, kB>(of, steps, work);
  }
  StoreTiles<kA, kB>(o, g.ldo);
}

// 32 packed rows at a time, whose weights (16 KB) stay in the first-level cache while V passes.
template <typename Work>
void Accumulate(const AccumulateArgs& g, Work& work) {
  for (int32_t row = 0; row < g.columns; row += kTwoBlocks) {
    if (g.alpha != nullptr) Rescale(g, row);
    FinishStores();
    const bool two = g.columns - row > kRows;
    int32_t panel = 0;
    for (; panel + 2 <= g.panels; panel += 2) {
      two ? AccumulateBlock<2, 2>(g, row, panel, work) : AccumulateBlock<1, 2>(g, row, panel, work);
    }
    if (panel == g.panels) continue;
    two ? AccumulateBlock<2, 1>(g, row, panel, work) : AccumulateBlock<1, 1>(g, row, panel, work);
  }
}

void Accumulate(const AccumulateArgs& args) {
  NoWork none;
  Accumulate(args, none);
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_AMX_ACCUMULATE_H_
