// Defines the tile primitives of gfx942: v_mfma 32x32x8 / 16x16x16 bf16, 64 KiB of LDS. It has
// neither 16-byte global-to-LDS copies nor a transposed read. Copies therefore pass through
// registers, and V is read as 4x4 blocks that byte permutes turn into operands. Layouts:
// kernels/hip/device/amd/mfma_wave.h.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX942_TILE_H_
#define MLA_KERNELS_HIP_DEVICE_GFX942_TILE_H_

#include "kernels/hip/device/amd/mfma_wave.h"

namespace mla::kernels::hip::tile {

// Copies are issued as loads into registers. They land in LDS when the previous tile has been
// consumed.
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
  // Makes data that the wave's lanes have landed visible to its other lanes.
  MLA_DEVICE void meet() { wave_barrier(); }
  MLA_DEVICE void close_stage() {}
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {}
};
using WeightCopies = Copies;  // for row products

// Packs two numbers that bf16 holds exactly.
MLA_DEVICE uint32_t upper_halves(float low, float high) {
  return permute_bytes(float_to_bits(high), float_to_bits(low), 0x07060302u);
}
// Widens two codes to bf16. `scale` is a power of two; 1 unless kScaled.
template <bool kHigh, bool kScaled>
MLA_DEVICE uint32_t bf16_of(uint32_t codes, float scale) {
  const f32x2 x = floats_of<kHigh>(codes);
  return kScaled ? upper_halves(x[0] * scale, x[1] * scale) : upper_halves(x[0], x[1]);
}

template <bool kHigh>
MLA_DEVICE uint32_t plain_bf16_of(uint32_t codes) {
  return bf16_of<kHigh, false>(codes, 1.0f);
}

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
  // One 16-byte chunk of both operands takes two instructions. Both operands split the depth in the
  // same way, so the sum is the same.
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
  // Does what ValueRows does, for codes: words of four columns, of four rows in each half of the
  // depth.
  template <int kTileRows>
  struct ValueCodes {
    static constexpr int kRun = 4;  // consecutive rows
    struct Raw {
      uint32_t r[2][4];
    };
    // Addresses of row r in the first column block. Other addresses differ by a constant, except
    // that fragments of half a block alternate between its halves.
    lds_t addresses[128 / kOutCols][4];
    MLA_DEVICE ValueCodes(lds_t tile, int lane) {
      const int col = 4 * (lane & (kRows - 1));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        addresses[0][r] =
            chunk_at<kTileRows>(tile, 4 * Base::group(lane) + r, col >> 4) + (col & 12);
        if constexpr (kOutCols == 64) addresses[1][r] = flip(addresses[0][r], 64);
      }
    }
    MLA_DEVICE void load(Raw& raw, int step, int fragment) const {
      constexpr int kPerBlock = 128 / kOutCols;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = step * kPvDepth + half * (kPvDepth / 2);
        static_assert(kPvDepth / 2 % 8 == 0);  // all steps have the same swizzle
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          raw.r[half][r] =
              shared_load<uint32_t>(addresses[fragment % kPerBlock][r] +
                                    fragment / kPerBlock * (kTileRows * 128) + row * 128);
        }
      }
    }
    MLA_DEVICE static void widen(V& v, const Raw& raw) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f32x2 x[4][2];  // [row][column / 2]
        floats(x, raw.r[half]);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          v.operand[u][half] = u32x2{upper_halves(x[0][u >> 1][u & 1], x[1][u >> 1][u & 1]),
                                     upper_halves(x[2][u >> 1][u & 1], x[3][u >> 1][u & 1])};
        }
      }
    }
    MLA_DEVICE static void floats(f32x2 (&x)[4][2], const uint32_t (&codes)[4]) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        x[r][0] = floats_of<false>(codes[r]);
        x[r][1] = floats_of<true>(codes[r]);
      }
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

#endif  // MLA_KERNELS_HIP_DEVICE_GFX942_TILE_H_
