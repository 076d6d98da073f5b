// Code shared by the scorers of attend_e4m3.h and attend_rows.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORES_H_

#include "kernels/hip/device/sm90/decode/rows64_codes/queries.h"

namespace mla::kernels::hip {

// Scores [64 x 64] of a tile, as a group of four warps has them. L: the layout of shared memory.
template <class C, class L, class Args = AttendArgs>
class E4m3Scores {
 public:
  // Places of the item, its index and its share.
  struct Tiles {
    int begin, end, unmasked_end, index, share;

    MLA_DEVICE Tiles(const RowSource<C::kAttention>& source, const Item& item, int i, int s)
        : begin(source.begin),
          end(source.end),
          unmasked_end(L::kLists ? source.end : item.limit(0)),
          index(i),
          share(s) {}
  };

 protected:
  using lds_t = tile::lds_t;
  using Rows = WarpgroupRows<C::kTileKv>;
  using Scores = typename Rows::Scores;
  static constexpr int kScores = Rows::kScoreElems;

  // Factors from scores to logits, as powers of two.
  struct Scale {
    float of[2];
    bool positive;  // both factors are positive

    MLA_DEVICE void read(const E4m3Scores& scores) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        of[slot] = tile::load_float(scores.shared.query_scale() + scores.row(slot) * 4);
      }
      positive = of[0] > 0.0f && of[1] > 0.0f;
    }
    // Returns the factor that is still to be applied to scores.
    MLA_DEVICE float rest(int slot) const { return positive ? of[slot] : 1.0f; }
  };

  MLA_DEVICE E4m3Scores(const Args& a, const L& layout)
      : args(a), shared(layout), warp(tile::wave_index() & 3), lane(tile::lane_index()) {}

  MLA_DEVICE int row(int slot) const { return Rows::row(warp, lane, slot); }

  // Hides unseen scores, replaces each by change(score, row's slot, keys' eight, number), and takes
  // the maxima.
  template <class Change>
  MLA_DEVICE void take_scores(const Tiles& tiles, int slot, int first, const Scale& scale,
                              Scores& s, float (&top)[2], const Change& change) const {
    if (!scale.positive) {
      // Scales scores now if a factor is not positive; otherwise the maximum would not belong to
      // the largest logit.
#pragma unroll
      for (int i = 0; i < kScores; ++i) s.c[i] *= scale.of[i >> 1 & 1];
    }
    if (L::kLists) hide_unseen(slot, s);
    if (first + C::kTileKv > tiles.unmasked_end) hide(tiles, first, s);
    float largest[2][2];  // each over two keys
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s.c[4 * j + i];
        x = change(x, i >> 1, j, i);
        largest[i >> 1][i & 1] = j == 0 ? x : max_f(largest[i >> 1][i & 1], x);
      }
    }
    top[0] = max_f(max_f(largest[0][0], largest[0][1]), negative_infinity());
    top[1] = max_f(max_f(largest[1][0], largest[1][1]), negative_infinity());
  }

  // Stores for this lane's rows the factor of earlier tiles' sums, applied before this tile's sums
  // are added.
  MLA_DEVICE void store_old_factors(int tile_slot, const float (&factor)[2], bool moved) const {
    if ((lane & 3) == 0) {
      tile::store_float(shared.old_factor(tile_slot) + row(0) * 4, factor[0]);
      tile::store_float(shared.old_factor(tile_slot) + row(1) * 4, factor[1]);
    }
    const bool any = tile::any(moved);
    if (lane == 0) tile::store_word(shared.moved(tile_slot) + warp * 4, any ? 1u : 0u);
  }

  const Args& args;
  const L shared;
  const int warp, lane;

 private:
  MLA_DEVICE void hide(const Tiles& tiles, int first, Scores& s) const {
    const Item item = load_item<L::kRows>(args, tiles.index, tiles.share);
    int limit[2];
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      limit[slot] = !L::kLists && p < item.rows ? item.limit(p) : tiles.end;
    }
    Rows::hide(s, limit, first, lane);
  }
  MLA_DEVICE void hide_unseen(int slot, Scores& s) const {
    float words[2];
    tile::load_two_floats(words, shared.seen(slot));
    const uint32_t seen[2] = {float_to_bits(words[0]), float_to_bits(words[1])};
    if ((seen[0] & seen[1]) == ~0u) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int at = (i >> 2 & 3) * 8 + 2 * (lane & 3) + (i & 1);
      s.c[i] = (seen[i >> 4] >> at & 1) != 0 ? s.c[i] : negative_infinity();
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORES_H_
