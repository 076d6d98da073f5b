// The first product of attend_rows.h and the softmax.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_SCORER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_SCORER_H_

#include "kernels/hip/device/sm90/decode/rows64_codes/copier.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/rows_layout.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/scores.h"

namespace mla::kernels::hip {

// For a row, x is a logit plus the logarithm of the key's power of two. Its probabilities 2^(x -
// origin + kShift) therefore include that power, and their sum divides it out again. The origin
// follows the largest x once that has grown by more than kSlack; the groups pass it to each other.
template <class C, class Args = AttendArgs>
class E4m3RowsScorer : E4m3Scores<C, E4m3RowsLayout<C>, Args> {
 public:
  using L = E4m3RowsLayout<C>;
  using Base = E4m3Scores<C, L, Args>;
  using typename Base::Tiles;

  struct State {
    float origin[2], sum[2];  // sums over this group's tiles and this lane's keys
    typename Base::Scale scale;
  };

  const int group;

  MLA_DEVICE E4m3RowsScorer(const Args& a, const L& layout)
      : Base(a, layout), group(tile::wave_index() >> 2) {}

  MLA_DEVICE void begin(const Item& item, State& state) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.origin[slot] = negative_infinity();
      state.sum[slot] = 0.0f;
    }
    using Queries = E4m3Queries<C, L>;
    static_assert(2 * L::kGroupWarps * Queries::kWarpRows == L::kRows);
    const Queries queries(item, tile::wave_index() * Queries::kWarpRows, lane);
    const float scale = item.segment->softmax_scale * kLog2e;
    tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>();  // the previous item's queries are no
                                                               // longer needed
    queries.store(shared, scale);
    tile::publish_shared();
    tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>();
    state.scale.read(*this);
  }

  // Scores tile t of an item, the `number`-th of all tiles: from scores to probabilities for both
  // groups.
  MLA_DEVICE void score(const Tiles& tiles, uint32_t number, int t, State& state) const {
    const int slot = static_cast<int>(number % L::kSlots);
    Scores s;
    tile::barrier_wait(shared.filled(slot), number / L::kSlots & 1);
    if (!E4m3Copier<C, L, Args>::converts(this->args)) convert_scales(slot);
    if (shared.has_one_scale(slot)) {
      score_at_once(slot, s.c);
    } else {
      score_blocks(slot, s.c);
    }
    KeyScales of_keys;
    read_key_scales(slot, of_keys);
    float top[2];
    // Turns scores into logits and adds the logarithms of the keys' powers.
    take_scores(tiles, slot, tiles.begin + t * C::kTileKv, state.scale, s, top,
                [&](float x, int h, int j, int i) {
                  return fma_f(x, state.scale.rest(h), of_keys.exponent(j, i));
                });
    float before[2] = {negative_infinity(), negative_infinity()};
    if (t > 0) {
      tile::barrier_wait(shared.published(group ^ 1), (number - 1) >> 1 & 1);
      read_origins(number - 1, before);
    }
    move_origins(slot, before, top, state);
    // The group's previous probabilities are no longer needed.
    tile::barrier_wait(shared.adopted(group), (number >> 1 & 1) ^ 1);
    make_probabilities(of_keys, state, s);
    store_probabilities(s);
    tile::publish_shared();
    tile::barrier_arrive(shared.published(group));
  }

  // Stores log-sum-exps, and sums for the groups that sum values. `last` is the number of the
  // item's last tile.
  MLA_DEVICE void finish(const Item& item, int tiles, uint32_t last, State& state) const {
    float origin[2] = {negative_infinity(), negative_infinity()};
    if (tiles > 0) read_origins(last, origin);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const float sum =
          Rows::row_sum(state.sum[slot]) * exp2_fast(state.origin[slot] - finite(origin[slot]));
      if ((lane & 3) == 0) tile::store_float(shared.sums(group) + row(slot) * 4, sum);
    }
    tile::named_sync<kGroupsBarrier, 2 * L::kGroupThreads>();
    if (group != 0 || (lane & 3) != 0) return;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      if (p >= item.rows) continue;
      const RowScale scale(origin[slot] - kShift, tile::load_float(shared.sums(0) + p * 4) +
                                                      tile::load_float(shared.sums(1) + p * 4));
      const RowTarget target(args, item, p, C::kLora);
      if (target.lse != nullptr) *target.lse = scale.lse;
    }
  }

 private:
  using Base::args, Base::shared, Base::warp, Base::lane;
  using Base::kScores, Base::row, Base::take_scores, Base::store_old_factors;
  using typename Base::lds_t, typename Base::Rows, typename Base::Scores;
  static constexpr float kShift = 7.0f;  // together with kSlack, below binary16's largest number
  static constexpr float kSlack = 8.0f;
  // Named barriers; the merge has one between them.
  static constexpr int kGroupsBarrier = 1, kScalesBarrier = 3;  // the latter for each group

  MLA_DEVICE static float finite(float origin) {
    return origin == negative_infinity() ? 0.0f : origin;
  }
  MLA_DEVICE void read_origins(uint32_t number, float (&origin)[2]) const {
    const lds_t at = shared.origin(static_cast<int>(number % L::kSlots));
    origin[0] = tile::load_float(at + row(0) * 4);
    origin[1] = tile::load_float(at + row(1) * 4);
  }
  // Converts the scales of a tile's keys, where the copying group leaves them as they are.
  MLA_DEVICE void convert_scales(int slot) const {
    shared.convert_scales(slot, warp, lane);
    if (group == 0) {
      tile::named_sync<kScalesBarrier, L::kGroupThreads>();
    } else {
      tile::named_sync<kScalesBarrier + 1, L::kGroupThreads>();
    }
  }
  // Blocks of columns have their own scales, so the sum so far is rescaled to the scale of each
  // next block (E4m3RowsLayout::block_scales).
  MLA_DEVICE void score_blocks(int slot, float (&s)[kScores]) const {
    publish_copies();
    start_blocks<false, 0>(slot, s);
    rescale(slot, 0, s);
    start_blocks<true, 1>(slot, s);
    rescale(slot, 1, s);
    start_blocks<true, 2>(slot, s);
    rescale(slot, 2, s);
    start_blocks<true, 3>(slot, s);
    rescale(slot, 3, s);
    start_rotated(slot, s);
    tile::wgmma_wait<0>();
    tile::pin(s);
  }
  // The copy engine writes as products read: through the async proxy.
  MLA_DEVICE static void publish_copies() {
    if constexpr (!Args::kBoxes) tile::publish_shared();
  }
  // For tiles in which each key has one scale.
  MLA_DEVICE void score_at_once(int slot, float (&s)[kScores]) const {
    publish_copies();
    start_blocks<false, 0, L::kBlocks>(slot, s);
    rescale(slot, L::kBlocks - 1, s);
    start_rotated(slot, s);
    tile::wgmma_wait<0>();
    tile::pin(s);
  }
  // Starts the products of kCount blocks from kFirst on.
  template <bool kAdd, int kFirst, int kCount = 1>
  MLA_DEVICE void start_blocks(int slot, float (&s)[kScores]) const {
    const uint64_t q = tile::along_rows(shared.queries()), k = tile::along_rows(shared.slot(slot));
    tile::pin(s);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4 * kCount; ++step) {
      const int offset = ((kFirst + step / 4) * L::kBlockBytes + step % 4 * 32) >> 4;
      tile::multiply_e4m3(s, q + offset, k + offset, kAdd || step > 0);
    }
    tile::wgmma_commit();
  }
  MLA_DEVICE void start_rotated(int slot, float (&s)[kScores]) const {
    const lds_t rope = shared.queries() + L::kLatentBytes;
    tile::pin(s);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      tile::wgmma_64x64(s, tile::along_rows(rope + step * 32),
                        tile::along_rows(shared.rope(slot) + step * 32), 1);
    }
    tile::wgmma_commit();
  }
  // Rescales by key, after the products are complete.
  MLA_DEVICE void rescale(int slot, int block, float (&s)[kScores]) const {
    float of_key[kScores / 4][2];
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      tile::load_two_floats(of_key[j], shared.block_scales(slot, j >> 1, block) + key(j & 1) * 4);
    }
    tile::wgmma_wait<0>();
    tile::pin(s);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= of_key[i >> 2][i & 1];
  }

  // Logarithms and inverses of the powers of this lane's keys, packed as in the layout.
  struct KeyScales {
    uint32_t of[kScores / 4][2];
    MLA_DEVICE float inverse(int j, int i) const { return bits_to_float(of[j][i & 1] << 16); }
    MLA_DEVICE float exponent(int j, int i) const {
      return bits_to_float(of[j][i & 1] & 0xffff0000u);
    }
  };
  MLA_DEVICE void read_key_scales(int slot, KeyScales& keys) const {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float words[2];
      tile::load_two_floats(words, shared.key_scales(slot) + key(j) * 4);
      keys.of[j][0] = float_to_bits(words[0]);
      keys.of[j][1] = float_to_bits(words[1]);
    }
  }

  // Returns the first of this lane's two keys in a group of eight.
  MLA_DEVICE int key(int eight) const { return 8 * eight + 2 * (lane & 3); }

  // Computes origins from the maxima of a tile. `before` holds the origins of the previous tile.
  MLA_DEVICE void move_origins(int tile_slot, const float (&before)[2], float (&top)[2],
                               State& state) const {
    float old_factor[2];
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      top[slot] = Rows::row_max(top[slot]);
      const bool follows = top[slot] > before[slot] + kSlack;
      const float next = follows ? top[slot] : before[slot];
      old_factor[slot] = follows ? exp2_fast(before[slot] - finite(next)) : 1.0f;
      state.sum[slot] *= exp2_fast(state.origin[slot] - finite(next));
      state.origin[slot] = next;
      moved |= follows;
      if ((lane & 3) == 0) tile::store_float(shared.origin(tile_slot) + row(slot) * 4, next);
    }
    store_old_factors(tile_slot, old_factor, moved);
  }

  MLA_DEVICE void make_probabilities(const KeyScales& keys, State& state, Scores& s) const {
    const float from[2] = {finite(state.origin[0]) - kShift, finite(state.origin[1]) - kShift};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int h = i >> 1 & 1;
      float& p = s.c[i];
      p = exp2_fast(p - from[h]);
      state.sum[h] = fma_f(p, keys.inverse(i >> 2, i), state.sum[h]);
    }
  }
  MLA_DEVICE void store_probabilities(const Scores& s) const {
    const int matrix_row = warp * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      tile::store_matrices(
          tile::chunk_at<L::kRows>(shared.probabilities(group), matrix_row, (i >> 2) + (lane >> 4)),
          tile::pack_f16(s.c[i], s.c[i + 1]), tile::pack_f16(s.c[i + 2], s.c[i + 3]),
          tile::pack_f16(s.c[i + 4], s.c[i + 5]), tile::pack_f16(s.c[i + 6], s.c[i + 7]));
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_SCORER_H_
