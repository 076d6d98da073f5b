// Rows of kFp8Tensor on AMD, widened to bf16 in registers between shared memory and the products: a
// TileFormat (kernels/hip/device/kv/tile_format.h).
//
// A read of keys takes 16 codes of a row, the operands of two steps of scores; queries have the
// same order of the depth. A read of values takes eight rows of a column, by a transposed read of
// bytes on gfx950.
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

// Returns eight codes times their scale, rounded to bf16.
MLA_DEVICE Chunk fp8_chunk(const uint32_t (&codes)[2], float scale) {
  const tile::u32x4 x = Fp8Codes::widened<true, true>(codes[0], codes[1], scale);
  return Chunk{{x[0], x[1], x[2], x[3]}};
}

// The KV rows of the elements of scores: runs as long as the codes of a read of values. For runs
// of eight, lanes swap bits 2 and 3 of the rows that they read as keys.
template <class C, class W>
struct CodeOrder {
  static constexpr int kRun = W::template ValueCodes<C::kTileKv>::kRun;
  MLA_DEVICE static constexpr int row(int row) {
    return kRun == 8 ? (row & ~12) | (row & 4) << 1 | (row & 8) >> 1 : row;
  }
  MLA_DEVICE static int score_col(int lane, int i) { return row(W::score_col(lane, i)); }
};

template <class C, class OfWave>
struct Fp8Format {
  using W = OfWave;
  using Layout = StageLayout<KvFormat::kFp8Tensor, C>;
  using Shape = TileShape<C, W>;
  using Rows = Fp8Rows<Layout>;
  using Copies = tile::Copies;
  using RowOrder = CodeOrder<C, W>;
  static constexpr bool kCodes = false, kRoundsQueries = false;
  static constexpr int kScoreSteps = Shape::kScoreSteps;
  static constexpr int kKeptBytes = 0;
  struct Rounded {};
  using lds_t = tile::lds_t;
  using Order = Fp8Format;
  static constexpr int kGroups = W::kGroups;  // lane groups over the depth
  static constexpr int kRowReads = (Layout::kLatentBytes + Layout::kRopeBytes) / 16 / kGroups;

  MLA_DEVICE static int score_col(int lane, int i) { return RowOrder::score_col(lane, i); }
  MLA_DEVICE static constexpr int depth(int step, int group) {
    return (step / 2 * kGroups + group) * 16 + step % 2 * 8;
  }

  struct Keys {
    struct Raw : W::K {};
    static constexpr int kFragments = Shape::kScoreFragments;
    static constexpr int kReads = kRowReads * kFragments;
    static constexpr int fragment(int n) { return n % kFragments; }
    static constexpr int products(int) { return 2; }
    static constexpr int step(int n, int j) { return n / kFragments * 2 + j; }

    MLA_DEVICE Keys(lds_t tile, int col_wave, int lane)
        : rows(tile, col_wave * Shape::kWaveCols, RowOrder::row(lane)) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, fragment(n) * W::kScoreCols, n / kFragments);
    }
    // Conversions keep NaN.
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int, int j) const {
      k.r = Fp8Codes::widened<false, false>(j == 0 ? raw.r[0] : raw.r[2],
                                            j == 0 ? raw.r[1] : raw.r[3], 1.0f);
    }
    MLA_DEVICE static void multiply(typename W::Scores& s, const typename W::Q& q,
                                    const typename W::K& k, int) {
      W::scores(s, q, k);
    }
    const typename W::template KeyRows<C::kTileKv> rows;
  };

  struct Values {
    using Codes = typename W::template ValueCodes<C::kTileKv>;
    using Raw = typename Codes::Raw;
    struct RowScales {};
    MLA_DEVICE static void load_scales(RowScales&, lds_t) {}
    static constexpr int kReads = Shape::kPvSteps * Shape::kOutFragments;
    static constexpr int step(int n) { return n / Shape::kOutFragments; }
    static constexpr int fragment(int n) { return n % Shape::kOutFragments; }

    MLA_DEVICE Values(lds_t tile, int wave_of_columns, int lane)
        : col_wave(wave_of_columns), rows(tile, lane) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, step(n), col_wave * Shape::kOutFragments + fragment(n));
    }
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw) const { Codes::widen(v, raw); }
    const int col_wave;
    const Codes rows;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_FP8_FORMAT_H_
