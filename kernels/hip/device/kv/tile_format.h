// Reads the operands of a wave of absorbed attention from a tile of KV rows in shared memory, by
// the format of the rows: the depth of each step of the scores, the keys and values, and the hiding
// of unseen values.
//
//   Keys     reads [0, kReads) of the wave's columns of scores. A read takes one fragment and makes
//            the operands of products(n) steps, each of which multiply() multiplies with its query
//   Values   reads [0, kReads) of the wave's columns of outputs, each of one step and one fragment,
//            ordered by groups of columns that share a scale, then by steps
//
// A format whose rows lie here as codes with scales (Layout::kRowScales) has more members. If a
// scale is not a power of two, Keys::odd() is true; then settle_scales() and Keys::score_exactly()
// compute the scores again. If the groups of a row have different scales, grouped() is true, and
// keep_p() stores the probabilities, and make_p_of_group() makes the operands of one group.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_TILE_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_KV_TILE_FORMAT_H_

#include "kernels/hip/device/kv/stage_layout.h"
#include "kernels/hip/device/primitives/query_loader.h"

namespace mla::kernels::hip {

// C is an AttendConfig, W is tile::Wave.
template <class C, class W>
struct TileShape {
  static constexpr int kWaveCols = C::kTileKv / C::kColWaves;  // columns of a tile's scores
  static constexpr int kScoreFragments = kWaveCols / W::kScoreCols;
  static constexpr int kScoreSteps = (C::kLora + C::kRope) / W::kDepth;
  static constexpr int kOutFragments = C::kLora / C::kColWaves / W::kOutCols;
  static constexpr int kPvSteps = C::kTileKv / W::kPvDepth;
  static_assert(kScoreFragments * C::kColWaves * W::kScoreCols == C::kTileKv);
  static_assert(kOutFragments * C::kColWaves * W::kOutCols == C::kLora);
};

// Multiplies rows that lie in shared memory as bf16; products use them unchanged.
template <class C, class OfWave>
struct Bf16Format {
  using W = OfWave;
  using Layout = StageLayout<KvFormat::kBf16, C>;
  using Shape = TileShape<C, W>;
  using Copies = tile::Copies;           // copies that bring tiles
  static constexpr bool kCodes = false;  // probabilities are rounded to 8 bits
  static constexpr bool kRoundsQueries = false;
  static constexpr int kScoreSteps = Shape::kScoreSteps;
  static constexpr int kKeptBytes = 0;
  struct Rounded {};  // per-row state for 8-bit products
  using lds_t = tile::lds_t;

  // Depth of a step: Order::depth(step, group) is the first of the eight values of a lane.
  using Order = PlainOrder<W>;
  template <int kRows>
  MLA_DEVICE static void load_q(typename W::Q& q, lds_t tile, int row0, int step, int lane) {
    W::template load_q<kRows>(q, tile, row0, step, lane);
  }

  MLA_DEVICE static int score_col(int lane, int i) { return W::score_col(lane, i); }

  struct Keys {
    using Raw = typename W::K;
    static constexpr int kReads = Shape::kScoreSteps * Shape::kScoreFragments;
    static constexpr int fragment(int n) { return n % Shape::kScoreFragments; }
    static constexpr int products(int) { return 1; }
    static constexpr int step(int n, int) { return n / Shape::kScoreFragments; }

    MLA_DEVICE Keys(lds_t tile, int col_wave, int lane)
        : rows(tile, col_wave * Shape::kWaveCols, lane) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, fragment(n) * W::kScoreCols, step(n, 0));
    }
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int, int) const { k = raw; }
    MLA_DEVICE static void multiply(typename W::Scores& s, const typename W::Q& q,
                                    const typename W::K& k, int) {
      W::scores(s, q, k);
    }
    const typename W::template KeyRows<C::kTileKv> rows;
  };

  struct Values {
    using Raw = typename W::V;
    struct RowScales {};
    MLA_DEVICE static void load_scales(RowScales&, lds_t) {}
    static constexpr int kReads = Shape::kPvSteps * Shape::kOutFragments;
    static constexpr int kGroupReads = kReads;  // reads that share scales
    static constexpr int step(int n) { return n / Shape::kOutFragments; }
    static constexpr int fragment(int n) { return n % Shape::kOutFragments; }

    MLA_DEVICE Values(lds_t tile, int wave_of_columns, int lane)
        : col_wave(wave_of_columns), rows(tile, lane) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, step(n), col_wave * Shape::kOutFragments + fragment(n));
    }
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw) const { v = raw; }
    const int col_wave;
    const typename W::template ValueRows<C::kTileKv> rows;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    hide_unseen_values<C, kThreads>(tile_base, first_row, thread);
  }
};

// Has the code for rows of 8-bit values that all architectures share.
template <class Layout>
struct Fp8Rows {
  using lds_t = tile::lds_t;
  static constexpr int kTileKv = Layout::kTileKv;

  // Returns the address of the scale of row `row` in group `group`; the scales of the next rows
  // follow it.
  MLA_DEVICE static lds_t scale_at(lds_t tile, int group, int row) {
    return tile + Layout::kScalesAt + (group * kTileKv + row) * 4;
  }
  // Returns true if some of `kCount` scales is not a power of two within the bounds of stored
  // scales.
  template <int kCount>
  MLA_DEVICE static bool odd(const float (&scales)[kCount]) {
    uint32_t all = 0, least = ~0u, largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits = float_to_bits(scales[i]);
      all |= bits;
      least = bits < least ? bits : least;
      largest = bits > largest ? bits : largest;
    }
    return (all & 0x807fffffu) != 0 || least < 0x00800000u || largest > kLargestScaleBits;
  }
  // As hide_unseen_values. Also clears scales that stand for NaN.
  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    constexpr int kChunks = Layout::kLatentBytes / 16;
    const int begin = first_row > 0 ? first_row : 0;
    for (int i = begin * kChunks + thread; i < kTileKv * kChunks; i += kThreads) {
      const lds_t address = tile::chunk_at<kTileKv>(tile_base, i / kChunks, i % kChunks);
      Chunk c = tile::load_chunk_shared(address);
      uint32_t cleared = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t hidden = nan_bytes(c.w[w]);
        c.w[w] &= ~hidden;
        cleared |= hidden;
      }
      if (cleared != 0) tile::store_chunk(address, c);
    }
    if constexpr (Layout::kRowScales) {
      for (int i = thread; i < Layout::kScaleWords; i += kThreads) {
        const lds_t address = scale_at(tile_base, 0, i);
        if (i % kTileKv < begin) continue;
        const float scale = tile::load_float(address);
        if (float_to_bits(scale) > kLargestScaleBits) {
          tile::store_float(address, 0.0f);
        }
      }
    }
  }

 private:
  // Returns 0xff for each byte that is a NaN.
  MLA_DEVICE static uint32_t nan_bytes(uint32_t codes) {
    uint32_t mask = 0;
#pragma unroll
    for (int b = 0; b < 32; b += 8) {
      const auto code = static_cast<uint8_t>(codes >> b & 0xffu);
      if (IsFp8NaN(code, kPoolFp8)) mask |= 0xffu << b;
    }
    return mask;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_TILE_FORMAT_H_
