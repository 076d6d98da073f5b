// Multiplies rows of fp8_tensor as codes, with queries and probabilities rounded to 8 bits: a
// TileFormat (kernels/hip/device/kv/tile_format.h) for tile::CodeWave. docs/fp8.md states the
// rounding.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_E4M3_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_E4M3_FORMAT_H_

#include "kernels/hip/device/amd/formats/code_rounding.h"
#include "kernels/hip/device/amd/formats/fp8_format.h"
#if MLA_GFX950
#include "kernels/hip/device/gfx950/code_wave.h"
#else
#include "kernels/hip/device/gfx942/code_wave.h"
#endif

namespace mla::kernels::hip {

template <class C>
struct E4m3Format {
  using W = tile::CodeWave<C::kWaveRows>;
  using Layout = StageLayout<C::kFormat, C>;
  using Shape = TileShape<C, W>;
  using Rows = Fp8Rows<Layout>;
  using Copies = tile::Copies;
  using lds_t = tile::lds_t;
  using RowOrder = CodeOrder<C, tile::Wave<C::kWaveRows>>;
  using Queries = CodeQueries<W>;
  using Rounded = CodeSums<W>;
  static constexpr bool kCodes = true, kRoundsQueries = true;
  static constexpr int kScoreSteps = Shape::kScoreSteps;
  static constexpr int kKeptBytes = 0;
  static_assert(Layout::kLayerScale && C::kColWaves == 1);

  MLA_DEVICE static int score_col(int lane, int i) { return RowOrder::score_col(lane, i); }

  // As CodeQueries::round.
  template <int kSteps>
  MLA_DEVICE static float load_queries(const QueryLoader& loader, int first_row, int lane,
                                       typename W::Q (&queries)[kSteps]) {
    const uint16_t* const from = loader.row(first_row + W::row(lane, 0));
    return Queries::template round<kSteps>(
        queries, [&](Chunk(&values)[Queries::kChunks], int step) {
          const int first = step * W::kDepth + W::group(lane) * W::kLaneCodes;
#pragma unroll
          for (int c = 0; c < Queries::kChunks; ++c) {
            values[c] = load_chunk(from, first + c * 8, false, loader.aligned);
          }
        });
  }

  struct Keys {
    using Raw = typename W::K;
    static constexpr int kReads = Shape::kScoreSteps * Shape::kScoreFragments;
    static constexpr int fragment(int n) { return n % Shape::kScoreFragments; }
    static constexpr int products(int) { return 1; }
    static constexpr int step(int n, int) { return n / Shape::kScoreFragments; }

    MLA_DEVICE Keys(lds_t tile, int, int lane) : rows(tile, 0, RowOrder::row(lane)) {}
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, fragment(n) * W::kScoreCols, step(n, 0));
    }
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int, int) const { k = raw; }
    MLA_DEVICE static void multiply(typename W::Scores& s, const typename W::Q& q,
                                    const typename W::K& k, int) {
      W::scores(s, q, k);
    }
    const typename W::template CodeKeys<C::kTileKv> rows;
  };

  struct Values {
    using Codes = typename W::template CodeValues<C::kTileKv>;
    using Raw = typename Codes::Raw;
    struct RowScales {};
    MLA_DEVICE static void load_scales(RowScales&, lds_t) {}
    static constexpr int kReads = Shape::kPvSteps * Shape::kOutFragments;
    static constexpr int step(int n) { return n / Shape::kOutFragments; }
    static constexpr int fragment(int n) { return n % Shape::kOutFragments; }

    MLA_DEVICE Values(lds_t tile, int, int lane) : rows(tile, lane) {}
    MLA_DEVICE void load(Raw& raw, int n) const { rows.load(raw, step(n), fragment(n)); }
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw) const { Codes::widen(v, raw); }
    const Codes rows;
  };

  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_E4M3_FORMAT_H_
