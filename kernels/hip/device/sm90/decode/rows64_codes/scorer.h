// The group of attend_e4m3.h that computes probabilities.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORER_H_

#include "kernels/hip/device/sm90/decode/rows64_codes/scores.h"

namespace mla::kernels::hip {

// In each tile, a row's probabilities are 2^(x - top + kShift), with `top` the row's largest logit
// in that tile. So no tile loses precision because of other tiles, and the largest probability is
// not rounded. Sums over tiles use an origin that follows the largest logit once that has grown by
// more than kSlack. The factor between `top` and the origin is published with the probabilities.
template <class C, class Args = AttendArgs>
class E4m3Scorer : E4m3Scores<C, E4m3Layout<C>, Args> {
 public:
  using L = E4m3Layout<C>;
  using Base = E4m3Scores<C, L, Args>;

  MLA_DEVICE E4m3Scorer(const Args& a, const L& layout) : Base(a, layout) {}

  // The item is loaded again for its results, because keeping it would take registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    State state;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      state.origin[slot] = negative_infinity();
      state.sum[slot] = state.coded[slot] = 0.0f;
    }
    const RowSource<C::kAttention> source(args, item);
    Held held;
    if (source.begin < source.end) bring_queries(item, held);
    state.scale.read(*this);
    const Tiles tiles(source, item, index, share);
    for (int first = tiles.begin; first < tiles.end; first += C::kTileKv) {
      attend_tile(tiles, first, held, state);
    }
    finish(load_item<L::kRows>(args, index, share), state);
  }

 private:
  using Base::args, Base::shared, Base::warp, Base::lane;
  using Base::kScores, Base::row, Base::take_scores, Base::store_old_factors;
  using typename Base::lds_t, typename Base::Rows, typename Base::Scores, typename Base::Tiles;
  static constexpr float kShift = 8.0f;  // 2^8 is the power of two below the largest code
  static constexpr float kSlack = 8.0f;
  static constexpr int kGroupBarrier = 1;

  struct State {
    float origin[2];
    // Sums of probabilities: unrounded, over this lane's keys; and as codes, over the row.
    float sum[2], coded[2];
    typename Base::Scale scale;
  };

  // The first columns of the queries as operands in registers, so that their products read only
  // keys from shared memory.
  struct Held {
    uint32_t q[C::kHeldSteps == 0 ? 1 : C::kHeldSteps][4];
  };
  struct TileSums {
    float from[2], factor[2];  // base of the exponents in the tile, and the factor from there to
                               // the origin
    float of[2] = {0.0f, 0.0f};
  };

  MLA_DEVICE void bring_queries(const Item& item, Held& held) const {
    tile::named_sync<kGroupBarrier, L::kGroupThreads>();  // the previous item's queries are no
                                                          // longer needed
    const float scale = item.segment->softmax_scale * kLog2e * layer_scale(item);
    using Queries = E4m3Queries<C, L>;
#pragma unroll 1
    for (int first = warp * Queries::kWarpRows; first < L::kRows;
         first += L::kGroupWarps * Queries::kWarpRows) {
      Queries(item, first, lane).store(shared, scale);
    }
    tile::publish_shared();
    tile::named_sync<kGroupBarrier, L::kGroupThreads>();
#pragma unroll
    for (int step = 0; step < C::kHeldSteps; ++step) {
      tile::load_matrices(held.q[step],
                          tile::chunk_at<L::kRows>(shared.queries(), warp * 16 + (lane & 15),
                                                   2 * step + (lane >> 4)));
    }
  }
  // Common scale of all values of the layer.
  MLA_DEVICE static float layer_scale(const Item& item) { return item.segment->kv_scale; }

  MLA_DEVICE void attend_tile(const Tiles& tiles, int first, const Held& held, State& state) {
    const int slot = ring.slot;
    Scores s;
    tile::barrier_wait(shared.filled(slot), ring.parity);
    start(slot, held, s.c);
    tile::wgmma_wait<0>();
    tile::pin(s.c);
    float top[2];
    take_scores(tiles, slot, first, state.scale, s, top, [](float x, int, int, int) { return x; });
    TileSums sums;
    move_origins(slot, top, sums, state);
    // The slot's previous probabilities are no longer needed.
    tile::barrier_wait(shared.adopted(slot), ring.parity ^ 1);
    uint32_t codes[kScores / 4];
    make_probabilities(state, s, codes, sums);
    store_probabilities(slot, codes);
    tile::publish_shared();
    tile::barrier_arrive(shared.published(slot));
    ring.next();
    add_sums(codes, sums, state);
  }
  MLA_DEVICE void add_sums(const uint32_t (&codes)[kScores / 4], const TileSums& sums,
                           State& state) const {
    float of_codes[4];  // sums over a row's keys: elements 0 and 2, one of each row
    const uint64_t ones = tile::along_rows(shared.ones());
    tile::pin(of_codes);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < C::kTileKv / 32; ++step) {
      const uint32_t operand[4] = {codes[4 * step], codes[4 * step + 1], codes[4 * step + 2],
                                   codes[4 * step + 3]};
      tile::multiply_held_e4m3(of_codes, operand, ones, step > 0);
    }
    tile::wgmma_commit();
    tile::wgmma_wait<0>();
    tile::pin(of_codes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.sum[h] = fma_f(sums.of[h], sums.factor[h], state.sum[h]);
      state.coded[h] = fma_f(of_codes[2 * h], sums.factor[h], state.coded[h]);
    }
  }

  // Starts the products of queries and a slot's keys.
  MLA_DEVICE void start(int slot, const Held& held, float (&s)[kScores]) const {
    const lds_t keys = shared.slot(slot);
    // The copy engine writes as products read: through the async proxy.
    if constexpr (!Args::kBoxes) tile::publish_shared();
    tile::pin(s);
    tile::wgmma_begin();
    const uint64_t q = tile::along_rows(shared.queries()), k = tile::along_rows(keys);
#pragma unroll
    for (int step = 0; step < 4 * L::kBlocks; ++step) {
      const int offset = (step / 4 * L::kBlockBytes + (step & 3) * 32) >> 4;
      if (step < C::kHeldSteps) {
        tile::multiply_held_e4m3(s, held.q[step], k + offset, step > 0);
      } else {
        tile::multiply_e4m3(s, q + offset, k + offset, step > 0);
      }
    }
    const uint32_t rope = shared.queries() + L::kLatentBytes;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      tile::multiply_e4m3(s, tile::along_narrow_rows(rope + step * 32),
                          tile::along_narrow_rows(keys + L::kLatentBytes + step * 32), 1);
    }
    tile::wgmma_commit();
  }

  // From the maxima of a tile, computes the base of its exponents and the factor from there to the
  // origin, which may move.
  MLA_DEVICE void move_origins(int tile_slot, float (&top)[2], TileSums& sums, State& state) const {
    float old_factor[2];
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      top[slot] = Rows::row_max(top[slot]);
      top[slot] *= state.scale.rest(slot);
      const bool follows = top[slot] > state.origin[slot] + kSlack;
      const float next = follows ? top[slot] : state.origin[slot];
      const float counted = next == negative_infinity() ? 0.0f : next;
      old_factor[slot] = follows ? exp2_fast(state.origin[slot] - counted) : 1.0f;
      sums.factor[slot] = exp2_fast(top[slot] - counted);
      sums.from[slot] = (top[slot] == negative_infinity() ? 0.0f : top[slot]) - kShift;
      state.origin[slot] = next;
      state.sum[slot] *= old_factor[slot];
      state.coded[slot] *= old_factor[slot];
      moved |= follows;
      if ((lane & 3) == 0) {
        tile::store_float(shared.factor(tile_slot) + row(slot) * 4, sums.factor[slot]);
      }
    }
    store_old_factors(tile_slot, old_factor, moved);
  }

  // Word 2 c + h of the codes holds row h, keys 2 (lane % 4) and the next, and the two keys eight
  // further, of every 16.
  MLA_DEVICE void make_probabilities(const State& state, const Scores& s,
                                     uint32_t (&codes)[kScores / 4], TileSums& sums) const {
#pragma unroll
    for (int c = 0; c < kScores / 8; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s.c[8 * c + 4 * (i >> 1) + 2 * h + (i & 1)];
          p[i] = exp2_fast(fma_f(x, state.scale.rest(h), -sums.from[h]));
        }
        sums.of[h] += (p[0] + p[1]) + (p[2] + p[3]);
        codes[2 * c + h] = tile::pack_e4m3(p[0], p[1], p[2], p[3]);
      }
    }
  }
  MLA_DEVICE void store_probabilities(int slot, const uint32_t (&codes)[kScores / 4]) const {
    const int matrix = lane >> 3, matrix_row = warp * 16 + (matrix & 1) * 8 + (lane & 7);
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const int place = (c + (matrix >> 1)) ^ narrow_swizzle(matrix_row);
      tile::store_matrices(shared.probabilities(slot) + matrix_row * L::kKeys + place * 16,
                           codes[2 * c], codes[2 * c + 1], codes[2 * c + 2], codes[2 * c + 3]);
    }
  }

  // Stores log-sum-exps and the scales of the results. The results are sums over codes, so they are
  // divided by the sum of codes instead of the sum of probabilities.
  MLA_DEVICE void finish(const Item& item, State& state) {
    if (items > 0) tile::barrier_wait(shared.taken(), (items - 1) & 1);
    ++items;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int p = row(slot);
      const float sum = Rows::row_sum(state.sum[slot]);
      const RowScale scale(state.origin[slot] - kShift, sum);
      if ((lane & 3) != 0) continue;
      tile::store_float(shared.result_scale() + p * 4,
                        scale.empty ? 0.0f : layer_scale(item) / state.coded[slot]);
      if (p >= item.rows) continue;
      const RowTarget target(args, item, p, C::kLora);
      if (target.lse != nullptr) *target.lse = scale.lse;
    }
    tile::barrier_arrive(shared.summed());
  }

  Ring<L::kSlots> ring;
  uint32_t items = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_SCORER_H_
