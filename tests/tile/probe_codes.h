// Probes of products of 8-bit floats on AMD, for probe.hip.
#ifndef MLA_TESTS_TILE_PROBE_CODES_H_
#define MLA_TESTS_TILE_PROBE_CODES_H_

#if MLA_GFX950
#include "kernels/hip/device/gfx950/code_wave.h"
#else
#include "kernels/hip/device/gfx942/code_wave.h"
#endif
#include "tests/tile/probe_args.h"

namespace mla::tile_test {

namespace tile = kernels::hip::tile;

// Probes of products of 8-bit floats; the functions also make their operands.
template <int kRows>
struct ProbeCodes {
  using W = tile::CodeWave<kRows>;
  static constexpr int kFragments = kKvRows / W::kScoreCols;
  static constexpr int kRun = tile::Wave<kRows>::template ValueCodes<kKvRows>::kRun;
  using Scores = typename W::Scores;

  MLA_DEVICE static tile::lds_t tile_of_codes() { return tile::shared_base<kKvRows * 128>(); }
  MLA_DEVICE static float number(const uint16_t* from, int at) {
    return kernels::hip::bits_to_float(static_cast<uint32_t>(from[at]) << 16);
  }
  MLA_DEVICE static uint32_t codes(const uint16_t* from, int at) {
    return W::codes(number(from, at), number(from, at + 1), number(from, at + 2),
                    number(from, at + 3));
  }
  // Copies a row-major [kKvRows, cols] matrix into a tile.
  MLA_DEVICE static void stage(const uint16_t* from, int cols) {
    for (int i = tile::lane_index(); i < kKvRows * cols / 16; i += tile::kWave) {
      kernels::hip::Chunk c;
      for (int w = 0; w < 4; ++w) c.w[w] = codes(from, 16 * i + 4 * w);
      tile::store_chunk(tile::chunk_at<kKvRows>(tile_of_codes(), i / (cols / 16), i % (cols / 16)),
                        c);
    }
    kernels::hip::block_barrier();
  }

  MLA_DEVICE static void scores(const ProbeArgs& args) {
    const int lane = tile::lane_index(), row = W::row(lane, 0);
    stage(args.b, kDepth);
    const typename W::template CodeKeys<kKvRows> keys(tile_of_codes(), 0, lane);
    Scores s[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int i = 0; i < W::kScoreElems; ++i) s[f].set(i, 0.0f);
#pragma unroll
      for (int step = 0; step < kDepth / W::kDepth; ++step) {
        typename W::Q q;
        const int first = row * kDepth + step * W::kDepth + W::group(lane) * W::kLaneCodes;
        for (int i = 0; i < W::kLaneCodes / 4; ++i) q.r[i] = codes(args.a, first + 4 * i);
        if constexpr (W::kTakesPowers) q.exponent = 127 + row % 4;
        typename W::K k;
        keys.load(k, f * W::kScoreCols, step);
        W::scores(s[f], q, k);
      }
      for (int i = 0; i < W::kScoreElems; ++i) {
        args.out[row * kKvRows + f * W::kScoreCols + W::score_col(lane, i)] = s[f].at(i);
      }
    }
  }

  // Takes probabilities in the layout of scores.
  MLA_DEVICE static void outputs(const ProbeArgs& args) {
    constexpr int kFragmentsOut = kOutCols / W::kOutCols;
    const int lane = tile::lane_index(), row = W::row(lane, 0);
    stage(args.b, kOutCols);
    Scores s[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int i = 0; i < W::kScoreElems; ++i) {
        const int col = W::score_col(lane, i);
        const int kv = kRun == 8 ? (col & ~12) | (col & 4) << 1 | (col & 8) >> 1 : col;
        s[f].set(i, number(args.a, row * kKvRows + f * W::kScoreCols + kv));
      }
    }
    const typename W::template CodeValues<kKvRows> values(tile_of_codes(), lane);
    typename W::Sums sums;
    typename W::Out o[kFragmentsOut];
    W::clear(sums);
#pragma unroll
    for (int f = 0; f < kFragmentsOut; ++f) W::clear(o[f]);
#pragma unroll
    for (int step = 0; step < kKvRows / W::kPvDepth; ++step) {
      typename W::P p;
      W::make_p(p, s, step);
      if constexpr (W::kTakesPowers) p.exponent = 127 + row % 4;
      W::add_up(sums, p);
#pragma unroll
      for (int f = 0; f < kFragmentsOut; ++f) {
        typename W::template CodeValues<kKvRows>::Raw raw;
        typename W::V v;
        values.load(raw, step, f);
        values.widen(v, raw);
        W::outputs(o[f], p, v);
      }
    }
#pragma unroll
    for (int f = 0; f < kFragmentsOut; ++f) {
      for (int i = 0; i < W::kOutElems; ++i) {
        args.out[row * kOutCols + W::out_col(lane, f, i)] = o[f].at(i);
      }
    }
    args.out[kRows * kOutCols + row] = W::total(sums);
  }
};
}  // namespace mla::tile_test

#endif  // MLA_TESTS_TILE_PROBE_CODES_H_
