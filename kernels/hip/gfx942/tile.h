// Tile primitives on gfx942: v_mfma 32x32x8 / 16x16x16 bf16, 64 KiB of LDS. There is neither a
// 16-byte global-to-LDS copy nor a transposed read, so copies pass through registers and V is read
// as 4x4 blocks that byte permutes turn into operands. Layouts: kernels/hip/amd/mfma_wave.h.
#ifndef MLA_KERNELS_HIP_GFX942_TILE_H_
#define MLA_KERNELS_HIP_GFX942_TILE_H_

#include "kernels/hip/amd/mfma_wave.h"

namespace mla::kernels::hip::tile {

// Copies issue as loads into registers and land in LDS when the tile before them has been consumed.
struct Copies {
  static constexpr bool kThroughRegisters = true;
  static constexpr bool kLookUpInLds = false;
  static constexpr int kMost = 12;
  u32x4 held[kMost];
  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t, int, const void* source) {
    static_assert(kIndex < kMost);
    held[kIndex] = *as_global<const u32x4>(source);
  }
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t wave_base, int lane) {
    shared_store<u32x4>(wave_base + kOffset + lane * 16, held[kIndex]);
  }
  MLA_DEVICE void close_stage() {}
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {}
};

template <int kRows_>
struct Wave : WaveBase<kRows_> {
  using Base = WaveBase<kRows_>;
  using Base::kPvDepth;
  using Base::kRows;
  using typename Base::K;
  using typename Base::P;
  using typename Base::Q;
  using typename Base::Scores;
  // Four accumulators share a read of V: accumulator u holds the columns congruent to u modulo 4.
  static constexpr int kOutCols = 4 * kRows;
  static constexpr int kOutElems = 4 * Base::kScoreElems;
  static constexpr int kRun = 4;

  struct V {
    u32x2 operand[4][2];  // [column mod 4][half of the depth]
  };
  struct Out {
    typename Base::Acc c[4];
    MLA_DEVICE float at(int i) const { return c[i & 3][i >> 2]; }
    MLA_DEVICE void set(int i, float x) { c[i & 3][i >> 2] = x; }
  };
  MLA_DEVICE static void clear(Out& o) {
#pragma unroll
    for (int u = 0; u < 4; ++u) o.c[u] = typename Base::Acc{};
  }
  MLA_DEVICE static void scale(Out& o, const float (&factor)[1]) {
#pragma unroll
    for (int u = 0; u < 4; ++u) o.c[u] *= factor[0];
  }
  MLA_DEVICE static int out_col(int lane, int fragment, int i) {
    return fragment * kOutCols + 4 * Base::acc_row(lane, i >> 2) + (i & 3);
  }
  MLA_DEVICE static typename Base::Acc multiply(u32x2 a, u32x2 b, typename Base::Acc c) {
    if constexpr (kRows == 32) {
      return multiply_32x32x8(a, b, c);
    } else {
      return multiply_16x16x16(a, b, c);
    }
  }
  // One 16-byte chunk of both operands is two instructions; which depth they call first is the same
  // for both, so the sum is the same.
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k) {
    s.c = multiply(u32x2{k.r[0], k.r[1]}, u32x2{q.r[0], q.r[1]}, s.c);
    s.c = multiply(u32x2{k.r[2], k.r[3]}, u32x2{q.r[2], q.r[3]}, s.c);
  }
  template <int kTileRows, Order kOrder = Order::kOfScores>
  MLA_DEVICE static void load_v(V& v, lds_t tile, int step, int fragment, int lane) {
    const int col = fragment * kOutCols + 4 * (lane & (kRows - 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = step * kPvDepth + (kOrder == Order::kAlongDepth
                                               ? half * 4 + 8 * Base::group(lane)
                                               : half * (kPvDepth / 2) + 4 * Base::group(lane));
      u32x2 x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        x[r] = shared_load<u32x2>(chunk_at<kTileRows>(tile, first + r, col >> 3) + (col & 4) * 2);
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        // Selects the low or high halves of two words: bytes 0-3 of the second operand, 4-7 of the
        // first.
        const uint32_t pick = (u & 1) ? 0x07060302u : 0x05040100u;
        v.operand[u][half] = u32x2{permute_bytes(x[1][u >> 1], x[0][u >> 1], pick),
                                   permute_bytes(x[3][u >> 1], x[2][u >> 1], pick)};
      }
    }
  }
  template <int kTileRows, Order kOrder = Order::kOfScores>
  struct ValueRows {
    lds_t tile;
    int lane;
    MLA_DEVICE ValueRows(lds_t tile_at, int lane_number) : tile(tile_at), lane(lane_number) {}
    MLA_DEVICE void load(V& v, int step, int fragment) const {
      load_v<kTileRows, kOrder>(v, tile, step, fragment, lane);
    }
  };
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      o.c[u] = multiply(v.operand[u][0], u32x2{p.r[0], p.r[1]}, o.c[u]);
      o.c[u] = multiply(v.operand[u][1], u32x2{p.r[2], p.r[3]}, o.c[u]);
    }
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_GFX942_TILE_H_
