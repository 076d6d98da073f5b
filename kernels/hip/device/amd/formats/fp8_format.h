// Rows of 8-bit floats on AMD, widened to bf16 in registers between shared memory and the products:
// a TileFormat (kernels/hip/device/kv/tile_format.h).
//
// A read of keys takes 16 codes of a row, the operands of two steps of scores; queries have the
// same order of the depth. A read of values takes eight rows of a column, by a transposed read of
// bytes on gfx950. Applying row scales to keys is free, because keys lie row by row in lanes.
// Values lie column by column, so the probabilities are multiplied instead, for each group of
// columns.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_FP8_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_FP8_FORMAT_H_

#include "kernels/hip/device/kv/tile_format.h"

namespace mla::kernels::hip {

struct Fp8Codes {
  // Widens the eight codes of two words to bf16. `scale` is a power of two, or any number if
  // kExact.
  template <bool kExact, bool kScaled>
  MLA_DEVICE static tile::u32x4 widened(uint32_t low, uint32_t high, float scale) {
    return tile::u32x4{
        pair<kExact, kScaled, false>(low, scale), pair<kExact, kScaled, true>(low, scale),
        pair<kExact, kScaled, false>(high, scale), pair<kExact, kScaled, true>(high, scale)};
  }
  template <bool kExact, bool kScaled, bool kHigh>
  MLA_DEVICE static uint32_t pair(uint32_t codes, float scale) {
    if constexpr (kExact) {
      const tile::f32x2 x = tile::floats_of<kHigh>(codes);
      return pack_bf16(x[0] * scale, x[1] * scale);
    } else {
      return tile::bf16_of<kHigh, kScaled>(codes, scale);
    }
  }
};

template <KvFormat kFormat, class C, class OfWave>
struct Fp8Format {
  using W = OfWave;
  using Layout = StageLayout<kFormat, C>;
  using Shape = TileShape<C, W>;
  using Rows = Fp8Rows<Layout>;
  using Copies = tile::Copies;
  static constexpr bool kCodes = false;
  struct Rounded {};
  using lds_t = tile::lds_t;
  using Order = Fp8Format;
  static constexpr int kGroups = W::kGroups;  // lane groups over the depth
  static constexpr int kBlockReads = 8 / kGroups;
  static constexpr int kLatentReads = Layout::kLatentBlocks * kBlockReads;
  static constexpr int kRopeReads = Layout::kRopeBytes / 16 / kGroups;
  static constexpr int kRowReads = kLatentReads + kRopeReads;
  static_assert(Layout::kFp8 && (!Layout::kRowScales || Layout::kGroupValues == 128));

  // The KV rows of the elements of scores: runs as long as the codes of a read of values. For runs
  // of eight, lanes swap bits 2 and 3 of the rows that they read as keys.
  static constexpr int kRun = W::template ValueCodes<C::kTileKv>::kRun;
  MLA_DEVICE static constexpr int run_order(int row) {
    return kRun == 8 ? (row & ~12) | (row & 4) << 1 | (row & 8) >> 1 : row;
  }
  MLA_DEVICE static int score_col(int lane, int i) { return run_order(W::score_col(lane, i)); }

  // Returns true if a read of keys reads codes; other reads give bf16, which products take
  // unchanged.
  MLA_DEVICE static constexpr bool codes(int read) {
    return read < kLatentReads || Layout::kFp8Rope;
  }
  MLA_DEVICE static constexpr int depth(int step, int group) {
    if (codes(step / 2)) return (step / 2 * kGroups + group) * 16 + step % 2 * 8;
    return C::kLora + ((step - 2 * kLatentReads) * kGroups + group) * 8;
  }

  struct Keys {
    struct Raw : W::K {};
    static constexpr int kFragments = Shape::kScoreFragments;
    static constexpr int kReads = kRowReads * kFragments;
    static constexpr int kScales = Layout::kRowScales ? Layout::kGroups * kFragments : 1;
    static constexpr int read(int n) { return n / kFragments; }
    static constexpr int fragment(int n) { return n % kFragments; }
    static constexpr int products(int n) { return codes(read(n)) ? 2 : 1; }
    static constexpr int step(int n, int j) {
      return codes(read(n)) ? 2 * read(n) + j : 2 * kLatentReads + read(n) - kLatentReads;
    }

    MLA_DEVICE Keys(lds_t tile, int col_wave, int lane)
        : rows(tile, col_wave * Shape::kWaveCols, run_order(lane)) {
      if constexpr (Layout::kRowScales) {
        const int row = col_wave * Shape::kWaveCols + (run_order(lane) & (W::kRows - 1));
#pragma unroll
        for (int i = 0; i < kScales; ++i) {
          scale[i] = tile::load_float(
              Rows::scale_at(tile, i / kFragments, row + i % kFragments * W::kScoreCols));
        }
      }
    }
    MLA_DEVICE bool odd() const {
      if constexpr (Layout::kRowScales) return tile::any(Rows::odd(scale));
      return false;
    }
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, fragment(n) * W::kScoreCols, read(n));
    }
    static constexpr bool kLooksAtCodes = false;  // conversions keep NaN
    MLA_DEVICE bool odd_codes() const { return false; }
    template <bool kExact>
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int n, int j) const {
      if (!codes(read(n))) {
        k.r = raw.r;
        return;
      }
      float by = 1.0f;
      if constexpr (Layout::kRowScales) {
        by = scale[read(n) / kBlockReads * kFragments + fragment(n)];
        if constexpr (kExact) by = stored_scale(by);
      }
      k.r = Fp8Codes::widened < kExact && Layout::kRowScales,
      Layout::kRowScales > (j == 0 ? raw.r[0] : raw.r[2], j == 0 ? raw.r[1] : raw.r[3], by);
    }
    const typename W::template KeyRows<C::kTileKv> rows;
    float scale[kScales];
  };

  struct Values {
    using Codes = typename W::template ValueCodes<C::kTileKv>;
    using Raw = typename Codes::Raw;
    static constexpr bool kScalesP = Layout::kRowScales;
    static constexpr int kWaveOutCols = C::kLora / C::kColWaves;
    static constexpr int kGroupFragments =
        Layout::kRowScales ? Layout::kGroupValues / W::kOutCols : Shape::kOutFragments;
    static constexpr int kReads = Shape::kPvSteps * Shape::kOutFragments;
    static constexpr int kGroupReads = Shape::kPvSteps * kGroupFragments;
    static_assert(!Layout::kRowScales || kWaveOutCols % Layout::kGroupValues == 0);
    static constexpr int group(int n) { return n / kGroupReads; }
    static constexpr int step(int n) { return n % kGroupReads / kGroupFragments; }
    static constexpr int fragments(int) { return 1; }
    static constexpr int fragment(int n, int) {
      return group(n) * kGroupFragments + n % kGroupFragments;
    }

    MLA_DEVICE Values(lds_t tile, int wave_of_columns, int lane_number)
        : base(tile), lane(lane_number), col_wave(wave_of_columns), rows(tile, lane_number) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, step(n), col_wave * Shape::kOutFragments + fragment(n, 0));
    }
    // Loads the scales of the rows of a lane's probabilities of step n, for its columns.
    MLA_DEVICE void load_scales(float (&to)[8], int n) const {
      const int of_columns = col_wave * (kWaveOutCols / Layout::kGroupValues) + group(n);
      const int row = step(n) * W::kPvDepth + kRun * W::group(lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Chunk c = tile::load_chunk_shared(
            Rows::scale_at(base, of_columns, row + half * (kRun == 8 ? 4 : W::kPvDepth / 2)));
#pragma unroll
        for (int i = 0; i < 4; ++i) to[half * 4 + i] = bits_to_float(c.w[i]);
      }
    }
    // Makes scaled probabilities for the columns of read n, from scores or from bf16 probabilities.
    template <int kFragments>
    MLA_DEVICE void make_p(typename W::P& p, const typename W::Scores (&s)[kFragments],
                           int n) const {
      float by[8];
      load_scales(by, n);
      tile::u32x4 words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_bf16(W::p_of(s, step(n), 2 * i) * by[2 * i],
                             W::p_of(s, step(n), 2 * i + 1) * by[2 * i + 1]);
      }
      p.r = words;
    }
    MLA_DEVICE void scale_p(typename W::P& p, const typename W::P& from, int n) const {
      float by[8];
      load_scales(by, n);
      tile::u32x4 words;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_bf16(bits_to_float(from.r[i] << 16) * by[2 * i],
                             bits_to_float(from.r[i] & 0xffff0000u) * by[2 * i + 1]);
      }
      p.r = words;
    }
    template <bool kExact>
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw, int n, int) const {
      if constexpr (kExact && Layout::kRowScales) {
        float by[8];
        load_scales(by, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) by[i] = stored_scale(by[i]);
        Codes::widen(v, raw, by);
      } else {
        Codes::widen(v, raw);
      }
    }
    const lds_t base;
    const int lane, col_wave;
    const Codes rows;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_FP8_FORMAT_H_
