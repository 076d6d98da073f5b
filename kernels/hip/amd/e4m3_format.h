// Rows of fp8_tensor multiplied as they are, with queries and probabilities in 8 bits: a TileFormat
// as kernels/hip/kv/tile_format.h describes it, for tile::CodeWave. docs/fp8.md says what is
// rounded.
#ifndef MLA_KERNELS_HIP_AMD_E4M3_FORMAT_H_
#define MLA_KERNELS_HIP_AMD_E4M3_FORMAT_H_

#include "kernels/hip/amd/fp8_format.h"
#include "kernels/hip/gfx950/code_rounding.h"

namespace mla::kernels::hip {

template <class C>
struct E4m3Format {
  using W = tile::CodeWave;
  using Layout = StageLayout<C::kFormat, C>;
  using Shape = TileShape<C, W>;
  using Rows = Fp8Rows<Layout>;
  using Copies = tile::Copies;
  using lds_t = tile::lds_t;
  using Widening = Fp8Format<C::kFormat, C, tile::Wave<32>>;
  static constexpr bool kCodes = true;
  static constexpr int kChunks = W::kLaneCodes / 16;  // of an operand
  static_assert(Layout::kLayerScale && C::kColWaves == 1);

  MLA_DEVICE static int score_col(int lane, int i) { return Widening::score_col(lane, i); }

  template <int kSteps>
  MLA_DEVICE static void load_queries(const QueryLoader& loader, int first_row, int lane,
                                      W::Q (&queries)[kSteps]) {
    const uint16_t* const from = loader.row(first_row + W::row(lane, 0));
    CodeRounding::queries(queries, [&](Chunk(&values)[CodeRounding::kValueChunks], int step) {
      const int first = step * W::kDepth + W::group(lane) * W::kLaneCodes;
#pragma unroll
      for (int c = 0; c < CodeRounding::kValueChunks; ++c) {
        values[c] = load_chunk(from, first + c * 8, false, loader.aligned);
      }
    });
  }
  template <class Softmax, int kFragments>
  MLA_DEVICE static bool update(Softmax& softmax, W::Scores (&s)[kFragments], float scale,
                                float slack, float (&factor)[W::kSlots], int& exponent) {
    return CodeRounding::update(softmax, s, scale, slack, factor, exponent);
  }

  struct Keys {
    using Raw = W::K;
    static constexpr int kReads = Shape::kScoreSteps * Shape::kScoreFragments;
    static constexpr int fragment(int n) { return n % Shape::kScoreFragments; }
    static constexpr int products(int) { return 1; }
    static constexpr int step(int n, int) { return n / Shape::kScoreFragments; }
    static constexpr bool kLooksAtCodes = false;

    MLA_DEVICE Keys(lds_t tile, int, int lane) {
      at[0] = tile::chunk_at<C::kTileKv>(tile, Widening::run_order(lane) & (W::kRows - 1),
                                         kChunks * W::group(lane));
#pragma unroll
      for (int i = 1; i < 4; ++i) at[i] = tile::flip(at[0], chunk(i) * 16);
    }
    MLA_DEVICE bool odd() const { return false; }
    MLA_DEVICE bool odd_codes() const { return false; }
    // Two steps are a column block.
    MLA_DEVICE void load(Raw& raw, int n) const {
      const int of_step = step(n, 0), row = fragment(n) * W::kScoreCols;
      const int place = of_step / 2 * (C::kTileKv * 128) + row * 128;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const tile::u32x4 x = tile::shared_load<tile::u32x4>(at[of_step % 2 * 2 + i] + place);
#pragma unroll
        for (int w = 0; w < 4; ++w) raw.r[4 * i + w] = x[w];
      }
    }
    template <bool kExact>
    MLA_DEVICE void widen(W::K& k, const Raw& raw, int, int) const {
      k = raw;
    }
    // Chunk i of those that a lane reads of a column block, from the first.
    static constexpr int chunk(int i) { return i / 2 * (W::kGroups * kChunks) + i % 2; }
    lds_t at[4];
  };

  struct Values {
    using Codes = W::ValueCodes<C::kTileKv>;
    using Raw = W::V;
    static constexpr bool kScalesP = false;
    static constexpr int kReads = Shape::kOutFragments;
    static constexpr int kGroupReads = kReads;
    static constexpr int group(int) { return 0; }
    static constexpr int step(int) { return 0; }
    static constexpr int fragments(int) { return 1; }
    static constexpr int fragment(int n, int) { return n; }

    MLA_DEVICE Values(lds_t tile, int, int lane) : rows(tile, lane) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        typename Codes::Raw x;
        rows.load(x, i, n);
        raw.r[2 * i] = x.r[0];
        raw.r[2 * i + 1] = x.r[1];
      }
    }
    template <bool kExact>
    MLA_DEVICE void widen(W::V& v, const Raw& raw, int, int) const {
      v = raw;
    }
    const Codes rows;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_AMD_E4M3_FORMAT_H_
