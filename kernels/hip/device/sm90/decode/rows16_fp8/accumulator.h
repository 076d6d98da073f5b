// The groups of attend_fp8.h that sum values and write results.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ACCUMULATOR_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ACCUMULATOR_H_

#include "kernels/hip/device/sm90/decode/rows16_fp8/values.h"

namespace mla::kernels::hip {

// One of two groups: it holds half of the output columns.
template <class C, class Args = AttendArgs>
class Fp8Accumulator {
 public:
  using L = Fp8Layout<C>;

  MLA_DEVICE Fp8Accumulator(const Args& a, const L& layout)
      : args(a),
        shared(layout),
        group((tile::wave_index() >> 2) - 2),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  MLA_DEVICE void attend(const Item& item) {
    float o[Values::kBlocks][kProduct];
#pragma unroll
    for (int b = 0; b < Values::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kProduct; ++i) o[b][i] = 0.0f;
    }
    const int tiles = fp8_tiles<C>(RowSource<C::kAttention>(args, item));
    // With lists, any row may be unseen.
    const int unmasked_end = L::kLists ? 0 : item.limit(0);
    const bool ragged = L::kLists || unmasked_end < item.work.kv_end;
    for (int t = 0; t < tiles; ++t) {
      const int end = item.work.kv_begin + (t + 1) * C::kTileKv;
      add(t & 1, ragged && end > unmasked_end, o);
    }
    finish(item, tiles > 0, o);
  }

 private:
  using lds_t = tile::lds_t;
  using Values = Fp8Values<C>;
  static constexpr int kProduct = Values::kProduct;
  static constexpr int kOwn = C::kRows / 4;  // as in the scorers

  MLA_DEVICE int row(int n) const { return 8 * (n >> 1) + 2 * (lane & 3) + (n & 1); }

  // Adds the next tile, whose probabilities group `from` publishes. `hide`: some keys may be
  // unseen.
  MLA_DEVICE void add(int from, bool hide, float (&o)[Values::kBlocks][kProduct]) {
    tile::barrier_wait(shared.published(from), seen >> from & 1);
    seen ^= 1u << from;
    if (tile::load_word_shared(shared.moved(from)) != 0) {
#pragma unroll
      for (int j = 0; j < kOwn / 2; ++j) {
        float factor[2];
        tile::load_two_floats(factor, shared.factor(from) + row(2 * j) * 4);
#pragma unroll
        for (int b = 0; b < Values::kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[b][4 * j + i] *= factor[i & 1];
        }
      }
    }
    // No wait for the slot: the scorers had seen it filled before they published.
    if (L::kLists || hide) {
      Values::template add<true>(shared, ring.slot, from, group, warp, lane, o);
    } else {
      Values::template add<false>(shared, ring.slot, from, group, warp, lane, o);
    }
    if (lane == 0) {
      tile::barrier_arrive(shared.emptied(ring.slot));
      tile::barrier_arrive(shared.adopted(from));
    }
    ring.next();
  }

  MLA_DEVICE void finish(const Item& item, bool any, const float (&o)[Values::kBlocks][kProduct]) {
    float sum[kOwn], origin[kOwn];
    if (any) tile::barrier_wait(shared.summed(), items++ & 1);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      sum[n] = 0.0f;
      origin[n] = negative_infinity();
      if (!any) continue;
      origin[n] = tile::load_float(shared.origin() + row(n) * 4);
#pragma unroll
      for (int w = 0; w < L::kScoreWarps; ++w) {
        sum[n] += tile::load_float(shared.sums(w) + row(n) * 4);
      }
    }
    if (any) tile::barrier_arrive(shared.taken());
    const bool aligned = aligned_results(args, item, 2);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int p = row(n);
      if (p >= item.rows) continue;
      const RowScale scale(origin[n] - C::kShift, sum[n]);
      const RowTarget target(args, item, p, C::kLora);
      if (group == 0 && warp == 0 && lane < 4 && target.lse != nullptr) *target.lse = scale.lse;
      const float inverse = scale.inverse * item.segment->kv_scale;
      const int i = 4 * (n >> 1) + (n & 1);
      if (Args::kSplit || item.work.partial_row >= 0) {
        store_part(target, o, i, scale.empty ? 0.0f : inverse);
      } else {
        store_whole(target, o, i, scale.empty ? 0.0f : inverse, aligned);
      }
    }
  }
  // Stores accumulators i and i + 2 of all blocks, a row's columns 2 (lane / 4) and the next of
  // each. `by` is zero for a row without keys, whose results are zero whatever values were summed.
  MLA_DEVICE void store_whole(const RowTarget& target, const float (&o)[Values::kBlocks][kProduct],
                              int i, float by, bool aligned) const {
#pragma unroll
    for (int b = 0; b < Values::kBlocks; ++b) {
      const float run[2] = {scaled(o[b][i], by), scaled(o[b][i + 2], by)};
      store_run(target.base, target.index + Values::column(group, b, warp) + 2 * (lane >> 2), run,
                target.f32, aligned);
    }
  }
  // The same in the order PartOrder::kPaired.
  MLA_DEVICE void store_part(const RowTarget& target, const float (&o)[Values::kBlocks][kProduct],
                             int i, float by) const {
    const int64_t index = target.index + group * (C::kLora / 2) + (warp * 8 + (lane >> 2)) * 4;
#pragma unroll
    for (int b = 0; b < Values::kBlocks; b += 2) {
      const float run[4] = {scaled(o[b][i], by), scaled(o[b][i + 2], by), scaled(o[b + 1][i], by),
                            scaled(o[b + 1][i + 2], by)};
      store_run(target.base, index + b * 64, run, target.f32, true);
    }
  }
  MLA_DEVICE static float scaled(float x, float by) { return by == 0.0f ? 0.0f : x * by; }

  const Args& args;
  const L shared;
  const int group, warp, lane;
  Ring<L::kSlots> ring;
  uint32_t items = 0, seen = 0;  // the latter's bits: parities of the groups' next tiles
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_ACCUMULATOR_H_
