// Rows of 8-bit floats on sm_90, widened to bf16 in registers on their way from shared memory to
// the products (mma.sync). A TileFormat as kernels/hip/kv/tile_format.h describes it.
//
// A code's bits moved to where bf16 has them make a number that is 2^120 times too small, exactly,
// denormal codes included: one product mends it, with the scale of a row for nothing. NaN codes
// would come out as numbers; keys that hold one are read again with conversions (Keys::odd_codes).
// Values need not be: a row with such a code has no finite logit, and its probability no number.
//
// ldmatrix moves pairs of codes as if they were bf16. Of keys a lane gets four neighbours of a row,
// the operand of two pairs of depth, so that queries are loaded in that order. Of values, read
// transposed, it gets two rows of an even column and of the odd one next to it: those are two
// products, and a lane's outputs are four neighbouring columns.
#ifndef MLA_KERNELS_HIP_SM90_FP8_FORMAT_H_
#define MLA_KERNELS_HIP_SM90_FP8_FORMAT_H_

#include "kernels/hip/kv/tile_format.h"

namespace mla::kernels::hip {

// Outputs in the order in which values of eight bits come.
template <int kRows>
struct Fp8Wave : tile::Wave<kRows> {
  using Base = tile::Wave<kRows>;
  static constexpr int kRun = 4;
  struct Out : Base::Out {
    MLA_DEVICE float at(int i) const {
      return this->c[i >> 3][i & 1][2 * (i >> 2 & 1) + (i >> 1 & 1)];
    }
  };
  MLA_DEVICE static constexpr int out_slot(int i) { return (i >> 3) * 2 + (i >> 2 & 1); }
  MLA_DEVICE static int out_col(int lane, int fragment, int i) {
    return fragment * Base::kOutCols + 4 * (lane & 3) + (i & 3);
  }
};

template <KvFormat kFormat, class C, class W>
struct Fp8Format {
  using Layout = StageLayout<kFormat, C>;
  using Shape = TileShape<C, W>;
  using Rows = Fp8Rows<Layout>;
  using lds_t = tile::lds_t;
  static constexpr int kReadCodes = 64;  // of a row, in a read of keys
  static constexpr int kLatentReads = C::kLora / kReadCodes;
  static constexpr int kLatentSteps = C::kLora / W::kDepth;
  static constexpr int kRopeReads = C::kRope / (Layout::kFp8Rope ? kReadCodes : W::kDepth);
  static_assert(Layout::kFp8 && W::kBlocks == 1 && W::kDepth == 32 && Shape::kScoreFragments == 1);

  MLA_DEVICE static constexpr bool codes(int read) {
    return read < kLatentReads || Layout::kFp8Rope;
  }
  // Queries of a tile of bf16, in the order that keys of the step have.
  template <int kRows>
  MLA_DEVICE static void load_q(typename W::Q& q, lds_t tile, int row0, int step, int lane) {
    if (!codes(step / 2)) return W::template load_q<kRows>(q, tile, row0, step, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = step * W::kDepth + h * 16 + 4 * (lane & 3);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + half * 8 + (lane >> 2);
        tile::load_2_words(q.r[0][h][half], q.r[0][h][half + 2],
                           tile::chunk_at<kRows>(tile, row, first >> 3) + (first & 4) * 2);
      }
    }
  }

  // Moves the bits of codes, times `factor`.
  MLA_DEVICE static uint32_t even(uint32_t x, uint32_t factor) {  // bytes 0 and 2
    return tile::multiply_bf16((x << 4 & 0x07f007f0u) | (x << 8 & 0x80008000u), factor);
  }
  MLA_DEVICE static uint32_t odd(uint32_t x, uint32_t factor) {  // bytes 1 and 3
    return tile::multiply_bf16((x >> 4 & 0x07f007f0u) | (x & 0x80008000u), factor);
  }
  // Bytes 0 and 1, 2 and 3.
  MLA_DEVICE static uint32_t low(uint32_t x, uint32_t factor) {
    return even((x & 0xffu) | (x & 0xff00u) << 8, factor);
  }
  MLA_DEVICE static uint32_t high(uint32_t x, uint32_t factor) {
    return odd((x >> 8 & 0xff00u) | (x & 0xff000000u), factor);
  }
  // 2^120, which the bits of a code lack, times scales up to 2^7.
  static constexpr uint32_t kPlainFactor = 0x7b807b80u;
  MLA_DEVICE static uint32_t factor_of(float of_low, float of_high) {
    return (float_to_bits(of_low) >> 16 | (float_to_bits(of_high) & 0xffff0000u)) + 0x3c003c00u;
  }
  static constexpr uint32_t kLargestFactorBits = (127u + 7u) << 23;

  struct Keys {
    struct Raw : W::K {};
    static constexpr int kReads = kLatentReads + kRopeReads;
    static constexpr int fragment(int) { return 0; }
    static constexpr int products(int n) { return codes(n) ? 2 : 1; }
    static constexpr int step(int n, int j) {
      return codes(n) ? 2 * n + j : kLatentSteps + n - kLatentReads;
    }

    MLA_DEVICE Keys(lds_t tile_at, int col_wave, int lane_number)
        : tile(tile_at), row0(col_wave * Shape::kWaveCols), lane(lane_number) {}
    // Scales are read again where they are used: registers are few.
    MLA_DEVICE float scale(int group) const {
      return tile::load_float(Rows::scale_at(tile, group, row0 + (lane >> 2)));
    }
    // Whether a row's scale cannot be multiplied as such: Attend then takes the exact way.
    MLA_DEVICE bool odd() const {
      if constexpr (Layout::kRowScales) {
        float scales[Layout::kGroups];
        uint32_t most = 0;
#pragma unroll
        for (int g = 0; g < Layout::kGroups; ++g) {
          scales[g] = scale(g);
          most = float_to_bits(scales[g]) > most ? float_to_bits(scales[g]) : most;
        }
        return tile::any(Rows::odd(scales) || most > kLargestFactorBits);
      }
      return false;
    }
    // Whether what was widened held a NaN.
    static constexpr bool kLooksAtCodes = true;
    MLA_DEVICE bool odd_codes() const { return tile::any((found & 0x80808080u) != 0); }
    MLA_DEVICE void load(Raw& raw, int n) const {
      tile::load_matrices(raw.r,
                          tile::chunk_at<C::kTileKv>(tile, row0 + (lane & 7), n * 4 + (lane >> 3)));
    }
    template <bool kExact>
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int n, int j) {
      if (!codes(n)) {
        k = raw;
        return;
      }
      float by = 1.0f;
      if constexpr (Layout::kRowScales) by = scale(n * kReadCodes / Layout::kGroupValues);
      if constexpr (kExact) by = stored_scale(by);
      const uint32_t factor = Layout::kRowScales ? factor_of(by, by) : kPlainFactor;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t x = raw.r[2 * j + h];
        if constexpr (kExact) {
          k.r[2 * h] = exact(tile::plain_bf16_of<false>(x), by);
          k.r[2 * h + 1] = exact(tile::plain_bf16_of<true>(x), by);
        } else {
          found |= (x & 0x7f7f7f7fu) + 0x01010101u;
          k.r[2 * h] = low(x, factor);
          k.r[2 * h + 1] = high(x, factor);
        }
      }
    }
    const lds_t tile;
    const int row0, lane;
    uint32_t found = 0;
  };
  MLA_DEVICE static uint32_t exact(uint32_t pair, float low_by, float high_by) {
    return pack_bf16(bits_to_float(pair << 16) * low_by,
                     bits_to_float(pair & 0xffff0000u) * high_by);
  }
  MLA_DEVICE static uint32_t exact(uint32_t pair, float by) { return exact(pair, by, by); }

  struct Values {
    struct Raw : W::V {};
    static constexpr bool kScalesP = false;
    static constexpr int kStepReads = Shape::kOutFragments / 2;  // of two fragments each
    static constexpr int kReads = Shape::kPvSteps * kStepReads;
    static constexpr int kGroupReads = kReads;
    static_assert(Shape::kOutFragments % 2 == 0);
    static_assert(!Layout::kRowScales || Layout::kGroupValues % (C::kLora / C::kColWaves) == 0);
    static constexpr int step(int n) { return n / kStepReads; }
    static constexpr int fragments(int) { return 2; }
    static constexpr int fragment(int n, int j) { return n % kStepReads * 2 + j; }

    MLA_DEVICE Values(lds_t tile_at, int wave_of_columns, int lane_number)
        : tile(tile_at), lane(lane_number), col_wave(wave_of_columns) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      const int chunk = col_wave * Shape::kOutFragments + fragment(n, 0);
      tile::load_matrices_transposed(
          raw.r, tile::chunk_at<C::kTileKv>(tile, step(n) * 16 + (lane & 15), chunk + (lane >> 4)));
    }
    // Of the rows that half `half` of a step's operand holds.
    MLA_DEVICE void load_scales(float (&to)[2], int n, int half) const {
      const int group = col_wave * (C::kLora / C::kColWaves) / Layout::kGroupValues;
      uint32_t bits[2];
      tile::load_2_words(bits[0], bits[1],
                         Rows::scale_at(tile, group, step(n) * 16 + half * 8 + 2 * (lane & 3)));
      to[0] = bits_to_float(bits[0]);
      to[1] = bits_to_float(bits[1]);
    }
    template <bool kExact>
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw, int n, int j) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t x = raw.r[2 * j + half];
        float by[2] = {1.0f, 1.0f};
        if constexpr (Layout::kRowScales) load_scales(by, n, half);
        if constexpr (kExact) {
          // Rows are in the halves of the word.
          v.r[half] = exact(tile::plain_bf16_of<false>((x & 0xffu) | (x >> 8 & 0xff00u)),
                            stored_scale(by[0]), stored_scale(by[1]));
          v.r[2 + half] = exact(tile::plain_bf16_of<false>((x >> 8 & 0xffu) | (x >> 16 & 0xff00u)),
                                stored_scale(by[0]), stored_scale(by[1]));
        } else {
          const uint32_t factor = Layout::kRowScales ? factor_of(by[0], by[1]) : kPlainFactor;
          v.r[half] = Fp8Format::even(x, factor);
          v.r[2 + half] = Fp8Format::odd(x, factor);
        }
      }
    }
    const lds_t tile;
    const int lane, col_wave;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

template <KvFormat kFormat, class C>
struct TileFormatOf {
  using Wave = Fp8Wave<C::kWaveRows>;
  using Type = Fp8Format<kFormat, C, Wave>;
};
template <class C>
struct TileFormatOf<KvFormat::kBf16, C> {
  using Wave = tile::Wave<C::kWaveRows>;
  using Type = Bf16Format<C, Wave>;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_FP8_FORMAT_H_
