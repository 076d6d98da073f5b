// Multiplies rows of kFp8Row on gfx950 with queries that are rounded to 8 bits: a TileFormat
// (kernels/hip/device/kv/tile_format.h). Scores are products of codes, which apply a power of two
// of each query and of each key's group of values; the rotated values stay bf16. Values are widened
// to bf16. They lie column by column in lanes, so not they but the probabilities are multiplied by
// the scales of the rows, for each group of columns.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_KEY_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_KEY_FORMAT_H_

#include "kernels/hip/device/amd/formats/code_rounding.h"
#include "kernels/hip/device/amd/formats/fp8_format.h"
#include "kernels/hip/device/gfx950/code_wave.h"

namespace mla::kernels::hip {

template <class C>
struct CodeKeyFormat {
  using W = tile::CodeKeyWave;
  using Layout = StageLayout<KvFormat::kFp8Row, C>;
  using Rows = Fp8Rows<Layout>;
  using Copies = tile::Copies;
  using lds_t = tile::lds_t;
  using RowOrder = CodeOrder<C, tile::Wave<C::kWaveRows>>;
  static constexpr bool kCodes = false, kRoundsQueries = true;
  struct Rounded {};
  static constexpr int kGroups = Layout::kGroups, kFragments = C::kTileKv / W::kScoreCols;
  static constexpr int kCodeSteps = C::kLora / W::kDepth;
  static constexpr int kRotatedSteps = Layout::kRopeBytes / (W::kGroups * 32);
  static constexpr int kScoreSteps = kCodeSteps + kRotatedSteps;
  static constexpr int kKeptBytes = C::kTileKv;  // of a lane: its probabilities, in bf16
  static_assert(C::kColWaves == 1 && Layout::kGroupValues == 2 * W::kDepth);

  MLA_DEVICE static int score_col(int lane, int i) { return RowOrder::score_col(lane, i); }

  // Does what CodeQueries::round does, for the latent values.
  MLA_DEVICE static float load_queries(const QueryLoader& loader, int first_row, int lane,
                                       typename W::Q (&queries)[kScoreSteps]) {
    const uint16_t* const from = loader.row(first_row + W::row(lane, 0));
    const int group = W::group(lane);
#pragma unroll
    for (int step = 0; step < kRotatedSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = step * 2 * W::kGroups + 2 * group + i;
        const Chunk c = load_chunk(from, C::kLora + chunk * 8, false, loader.aligned);
#pragma unroll
        for (int w = 0; w < 4; ++w) queries[kCodeSteps + step].r[4 * i + w] = c.w[w];
      }
    }
    using Queries = CodeQueries<W>;
    return Queries::template round<kCodeSteps>(
        queries, [&](Chunk(&values)[Queries::kChunks], int step) {
          const int first = step * W::kDepth + group * W::kLaneCodes;
#pragma unroll
          for (int c = 0; c < Queries::kChunks; ++c) {
            values[c] = load_chunk(from, first + c * 8, false, loader.aligned);
          }
        });
  }

  struct Keys {
    using Raw = typename W::Codes::K;
    static constexpr int kReads = kScoreSteps * kFragments;
    static constexpr int fragment(int n) { return n % kFragments; }
    static constexpr int products(int) { return 1; }
    static constexpr int step(int n, int) { return n / kFragments; }

    MLA_DEVICE Keys(lds_t tile_at, int, int lane_number)
        : tile(tile_at), lane(lane_number), rows(tile_at, 0, RowOrder::row(lane_number)) {
#pragma unroll
      for (int i = 0; i < kGroups * kFragments; ++i) {
        const int row = RowOrder::row(lane) & (W::kRows - 1);
        scale[i] = tile::load_float(
            Rows::scale_at(tile, i / kFragments, row + i % kFragments * W::kScoreCols));
      }
    }
    MLA_DEVICE bool odd() const { return tile::any(Rows::odd(scale)); }
    // Returns true if the groups of some row have different scales.
    MLA_DEVICE bool grouped() const {
      uint32_t differences = 0;
#pragma unroll
      for (int i = kFragments; i < kGroups * kFragments; ++i) {
        differences |= float_to_bits(scale[i]) ^ float_to_bits(scale[i % kFragments]);
      }
      return tile::any(differences != 0);
    }
    MLA_DEVICE void load(Raw& raw, int n) const {
      rows.load(raw, fragment(n) * W::kScoreCols, step(n, 0));
    }
    MLA_DEVICE void widen(typename W::K& k, const Raw& raw, int n, int) const {
      k.r = raw.r;
      if (step(n, 0) < kCodeSteps) {
        k.exponent =
            static_cast<int>(float_to_bits(scale[step(n, 0) / 2 * kFragments + fragment(n)]) >> 23);
      }
    }
    MLA_DEVICE static void multiply(typename W::Scores& s, const typename W::Q& q,
                                    const typename W::K& k, int n) {
      if (step(n, 0) < kCodeSteps) {
        W::code_scores(s, q, k);
      } else {
        W::bf16_scores(s, q, k);
      }
    }
    // Computes all scores again, for any scales. REQUIRES settle_scales(). Products apply the
    // powers of two, and each group's mantissa multiplies what has been summed: divided by the next
    // group's, so that the sum needs no second accumulator.
    MLA_DEVICE void score_exactly(const typename W::Q (&queries)[kScoreSteps],
                                  typename W::Scores (&s)[kFragments]) const {
      for_constants<kFragments>([&](auto f) {
        s[f].c = typename W::Acc{};
        for_constants<kGroups>([&](auto group) {
#pragma unroll
          for (int step = 2 * group; step < 2 * group + 2; ++step) {
            schedule_fence();
            typename W::K k;
            rows.load(k, f * W::kScoreCols, step);
            k.exponent = static_cast<int>(
                float_to_bits(stored_scale(scale[group * kFragments + f])) >> 23 & 255);
            W::code_scores(s[f], queries[step], k);
          }
          multiply_mantissas<group>(s[f], f * W::kScoreCols);
        });
#pragma unroll
        for (int step = kCodeSteps; step < kScoreSteps; ++step) {
          schedule_fence();
          typename W::K k;
          rows.load(k, f * W::kScoreCols, step);
          W::bf16_scores(s[f], queries[step], k);
        }
      });
    }

    const lds_t tile;
    const int lane;
    const typename W::Codes::template CodeKeys<C::kTileKv> rows;
    float scale[kGroups * kFragments];

   private:
    // A scale that stands for NaN has the exponent 255 in the products, which is NaN there.
    MLA_DEVICE static float mantissa(uint32_t scale_bits) {
      return bits_to_float((scale_bits & 0x807fffffu) | 0x3f800000u);
    }
    template <int kGroup>
    MLA_DEVICE void multiply_mantissas(typename W::Scores& s, int first_row) const {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; i += 4) {
        schedule_fence();
        const int row = first_row + score_col(tile::lane_again(), i);
        const Chunk by = tile::load_chunk_shared(Rows::scale_at(tile, kGroup, row));
        Chunk next{};
        if constexpr (kGroup + 1 < kGroups) {
          next = tile::load_chunk_shared(Rows::scale_at(tile, kGroup + 1, row));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s.set(i + j, s.at(i + j) * (mantissa(by.w[j]) * tile::reciprocal(mantissa(next.w[j]))));
        }
      }
    }
  };

  struct Values {
    using Shape = TileShape<C, tile::Wave<C::kWaveRows>>;
    using Codes = typename W::template ValueCodes<C::kTileKv>;
    using Raw = typename Codes::Raw;
    static constexpr int kReads = Shape::kPvSteps * Shape::kOutFragments;
    static constexpr int kGroupFragments = Layout::kGroupValues / W::kOutCols;
    static constexpr int kGroupReads = Shape::kPvSteps * kGroupFragments;
    static constexpr int step(int n) { return n % kGroupReads / kGroupFragments; }
    static constexpr int fragment(int n) {
      return n / kGroupReads * kGroupFragments + n % kGroupFragments;
    }

    MLA_DEVICE Values(lds_t tile, int, int lane_number)
        : base(tile), lane(lane_number), rows(tile, lane_number) {}
    MLA_DEVICE void load(Raw& raw, int n) const { rows.load(raw, step(n), fragment(n)); }
    MLA_DEVICE void widen(typename W::V& v, const Raw& raw) const { Codes::widen(v, raw); }

    // The scales of the rows to which a lane's probabilities belong.
    struct StepScales {
      Chunk of[2];
      MLA_DEVICE float at(int i) const { return bits_to_float(of[i / 4].w[i % 4]); }
    };
    struct RowScales {
      StepScales of_step[Shape::kPvSteps];
    };
    MLA_DEVICE static void load_scales(StepScales& scales, lds_t tile, int group, int step) {
      static_assert(Codes::kRun == 8);
      const int row = step * W::kPvDepth + 8 * W::group(tile::lane_again());
      const lds_t at = Rows::scale_at(tile, group, row);
      scales.of[0] = tile::load_chunk_shared(at);
      scales.of[1] = tile::load_chunk_shared(at + 16);
    }
    MLA_DEVICE static void load_scales(RowScales& scales, lds_t tile) {
#pragma unroll
      for (int i = 0; i < Shape::kPvSteps; ++i) load_scales(scales.of_step[i], tile, 0, i);
    }
    // Makes the probabilities of a step, times the scales of their rows.
    MLA_DEVICE static void make_p(typename W::P& p, const typename W::Scores (&s)[kFragments],
                                  const StepScales& by, int step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p.r[i] = pack_bf16(W::p_of(s, step, 2 * i) * by.at(2 * i),
                           W::p_of(s, step, 2 * i + 1) * by.at(2 * i + 1));
      }
    }
    // Makes all steps, for rows whose groups share a scale.
    MLA_DEVICE void make_p(typename W::P (&p)[Shape::kPvSteps],
                           const typename W::Scores (&s)[kFragments], const RowScales& by) const {
#pragma unroll
      for (int i = 0; i < Shape::kPvSteps; ++i) make_p(p[i], s, by.of_step[i], i);
    }
    // For rows whose groups have scales of their own. keep_p() stores kKeptBytes of probabilities a
    // lane, from `area` on; make_p_of_group() makes the operands of the group that begins with
    // read n from them.
    MLA_DEVICE static void keep_p(lds_t area, const typename W::Scores (&s)[kFragments]) {
      const lds_t own = kept(area);
#pragma unroll
      for (int i = 0; i < Shape::kPvSteps; ++i) {
        schedule_fence();
        typename W::P p;
        W::make_p(p, s, i);
        tile::shared_store<tile::u32x4>(own + i * 16, p.r);
      }
    }
    MLA_DEVICE void make_p_of_group(typename W::P (&p)[Shape::kPvSteps], lds_t area, int n) const {
      const lds_t own = kept(area);
#pragma unroll
      for (int i = 0; i < Shape::kPvSteps; ++i) {
        schedule_fence();
        StepScales by;
        load_scales(by, base, n / kGroupReads, i);
        const auto x = tile::shared_load<tile::u32x4>(own + i * 16);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          p[i].r[w] = pack_bf16(bits_to_float(x[w] << 16) * by.at(2 * w),
                                bits_to_float(x[w] & 0xffff0000u) * by.at(2 * w + 1));
        }
      }
    }
    MLA_DEVICE static lds_t kept(lds_t area) {
      return area + tile::opaque(thread_index()) * kKeptBytes;
    }
    const lds_t base;
    const int lane;
    const Codes rows;
  };

  // Replaces scales that are none by NaN. REQUIRES: all waves of the block call it.
  template <int kThreads>
  MLA_DEVICE static void settle_scales(lds_t tile_base) {
    block_barrier();
    for (int i = tile::opaque(thread_index()); i < Layout::kScaleWords; i += kThreads) {
      const lds_t at = Rows::scale_at(tile_base, 0, i);
      tile::store_float(at, stored_scale(tile::load_float(at)));
    }
    block_barrier();
  }
  template <int kThreads>
  MLA_DEVICE static void hide_unseen(lds_t tile_base, int first_row, int thread) {
    Rows::template hide_unseen<kThreads>(tile_base, first_row, thread);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_KEY_FORMAT_H_
