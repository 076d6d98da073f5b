// The groups of attend_fp8.h that make probabilities.
#ifndef MLA_KERNELS_HIP_SM90_FP8_SCORER_H_
#define MLA_KERNELS_HIP_SM90_FP8_SCORER_H_

#include "kernels/hip/sm90/fp8/keys.h"
#include "kernels/hip/sm90/fp8/queries.h"

namespace mla::kernels::hip {

// One of two groups: of an item's tiles it takes every second one. Origins go to and fro between
// the groups with the probabilities.
template <class C>
class Fp8Scorer {
 public:
  using L = Fp8Layout<C>;

  MLA_DEVICE Fp8Scorer(const AttendArgs& a, const L& layout)
      : args(a),
        shared(layout),
        group(tile::wave_index() >> 2),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  // What a tile wants to know of the item is read again where it is wanted, rather than held in
  // registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    const int tiles = fp8_tiles<C>(item);
    if (tiles == 0) return;
    begin(item);
    const int unmasked_end = item.limit(0), kv_begin = item.work.kv_begin;
    const SegmentRecord* const segment = item.segment;
    float sum[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) sum[n] = 0.0f;
    for (int t = 0; t < tiles; ++t, ring.next()) {
      if ((t & 1) == group) {
        const int first = kv_begin + t * C::kTileKv;
        float s[kProduct];
        const Scales scales = score(*segment, s);
        if (first + C::kTileKv > unmasked_end) {
          hide(load_item<C::kRows>(args, index, share), first, s);
        }
        if (t > 0) others_sums(sum);
        publish(scales, s, sum);
      }
    }
    if (((tiles - 1) & 1) != group) others_sums(sum);
    add_sums(sum);
  }

 private:
  using lds_t = tile::lds_t;
  using Keys = Fp8Keys<C>;
  using Scales = Fp8KeyScales<C>;
  static constexpr int kProduct = C::kRows / 2;  // accumulators of 64 x kRows, of a thread
  static constexpr int kOwn = C::kRows / 4;      // packed rows of a thread, in pairs
  static constexpr float kSlack = 8.0f;          // probabilities stay below 2^(8 + kShift)
  // Named barriers: of both groups, of one (and the next).
  static constexpr int kBoth = 1, kGroup = 2;

  // Packed row of element n (0 to kOwn - 1); accumulator 4 (n / 2) + n % 2 is its first.
  MLA_DEVICE int row(int n) const { return 8 * (n >> 1) + 2 * (lane & 3) + (n & 1); }
  MLA_DEVICE static constexpr int own(int i) { return (i >> 2) * 2 + (i & 1); }
  MLA_DEVICE static float finite(float x) { return x == negative_infinity() ? 0.0f : x; }

  MLA_DEVICE void begin(const Item& item) {
    if (items > 0) tile::barrier_wait(shared.taken(), (items - 1) & 1);
    ++items;
    Fp8Queries<C>::write(shared, item, tile::wave_index(), lane);
    if (thread_index() < C::kRows) {
      tile::store_float(shared.origin() + thread_index() * 4, negative_infinity());
    }
    tile::publish_shared();
    tile::named_sync<kBoth, 2 * L::kGroupThreads>();
  }

  // Scores of the group's next tile, and its keys' scales.
  MLA_DEVICE Scales score(const SegmentRecord& segment, float (&s)[kProduct]) const {
    tile::barrier_wait(shared.filled(ring.at), ring.parity);
    const Scales scales(shared, ring.at, Keys::key(warp, lane, 0), Keys::key(warp, lane, 1), lane);
    Keys::score(shared, ring.at, segment, warp, lane, scales, s);
    if (lane == 0) tile::barrier_arrive(shared.emptied(ring.at));
    return scales;
  }

  // Scores that a packed row does not see.
  MLA_DEVICE void hide(const Item& item, int first, float (&s)[kProduct]) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int p = row(n), limit = p < item.rows ? item.limit(p) : item.work.kv_end;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = s[4 * (n >> 1) + 2 * half + (n & 1)];
        x = first + Keys::key(warp, lane, half) < limit ? x : negative_infinity();
      }
    }
  }

  // Waits for the other group's tile and follows its origins.
  MLA_DEVICE void others_sums(float (&sum)[kOwn]) {
    const int other = group ^ 1;
    tile::barrier_wait(shared.published(other), others_seen++ & 1);
    if (tile::load_word_shared(shared.moved(other)) == 0) return;
#pragma unroll
    for (int j = 0; j < kOwn / 2; ++j) {
      float factor[2];
      tile::load_two_floats(factor, shared.factor(other) + row(2 * j) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[2 * j + e] *= factor[e];
    }
  }

  // Probabilities of the own tile and all that the others want to know of it. Where keys have
  // scales, those are part of the probabilities here, but not of the sums.
  MLA_DEVICE void publish(const Scales& scales, float (&s)[kProduct], float (&sum)[kOwn]) {
    float origin[kOwn];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kProduct; ++i) {
      if constexpr (L::kScaledRows) s[i] += scales.exponent(i >> 1 & 1);
    }
#pragma unroll
    for (int j = 0; j < kOwn / 2; ++j) {
      float pair[2];
      tile::load_two_floats(pair, shared.origin() + row(2 * j) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        origin[2 * j + e] = pair[e];
        grown |= max_f(s[4 * j + e], s[4 * j + 2 + e]) > pair[e] + kSlack;
      }
    }
    // What this group has published last is no longer needed.
    if (own_seen > 0) tile::barrier_wait(shared.adopted(group), (own_seen - 1) & 1);
    ++own_seen;
    const bool moved = group_any(grown);
    if (moved) move_origins(s, origin, sum);
    if ((thread_index() & (L::kGroupThreads - 1)) == 0) {
      tile::store_word(shared.moved(group), moved ? 1u : 0u);
    }
#pragma unroll
    for (int i = 0; i < kProduct; ++i) {
      s[i] = exp2_fast(s[i] - finite(origin[own(i)]) + C::kShift);
      sum[own(i)] += L::kScaledRows ? s[i] * scales.inverse(i >> 1 & 1) : s[i];
    }
    const int matrix = lane >> 3;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; j += 2) {
      tile::store_matrices_transposed(
          tile::chunk_at<C::kRows>(shared.probabilities(group),
                                   8 * (j + (matrix >> 1)) + (lane & 7), 2 * warp + (matrix & 1)),
          tile::pack_f16(s[4 * j], s[4 * j + 1]), tile::pack_f16(s[4 * j + 2], s[4 * j + 3]),
          tile::pack_f16(s[4 * j + 4], s[4 * j + 5]), tile::pack_f16(s[4 * j + 6], s[4 * j + 7]));
    }
    if constexpr (L::kScaledRows) scales.publish(shared.scales(group, 0), warp, lane);
    tile::publish_shared();
    tile::barrier_arrive(shared.published(group));
  }
  MLA_DEVICE bool group_any(bool x) const {
    return group == 0 ? tile::named_any<kGroup, L::kGroupThreads>(x)
                      : tile::named_any<kGroup + 1, L::kGroupThreads>(x);
  }
  MLA_DEVICE void group_sync() const {
    if (group == 0) {
      tile::named_sync<kGroup, L::kGroupThreads>();
    } else {
      tile::named_sync<kGroup + 1, L::kGroupThreads>();
    }
  }

  // Over the lanes that hold keys of a packed row.
  template <class Join>
  MLA_DEVICE static float of_row(float x, const Join& join) {
    x = join(x, tile::exchange<4>(x));
    x = join(x, tile::exchange<8>(x));
    return join(x, tile::exchange<16>(x));
  }

  // Origins follow maxima that have grown by more than the slack.
  MLA_DEVICE void move_origins(const float (&s)[kProduct], float (&origin)[kOwn],
                               float (&sum)[kOwn]) const {
    const bool writes = lane < 4;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = 4 * (n >> 1) + (n & 1);
      const float top = of_row(max_f(s[i], s[i + 2]), [](float a, float b) { return max_f(a, b); });
      if (writes) tile::store_float(shared.maxima(group * 4 + warp) + row(n) * 4, top);
    }
    group_sync();
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      float top = negative_infinity();
#pragma unroll
      for (int w = 0; w < L::kGroupWarps; ++w) {
        top = max_f(top, tile::load_float(shared.maxima(group * 4 + w) + row(n) * 4));
      }
      const float now = top > origin[n] + kSlack ? top : origin[n];
      const float factor = exp2_fast(origin[n] - finite(now));
      sum[n] *= factor;
      origin[n] = now;
      // All warps of the group have read the origins: they met since.
      if (writes && warp == 0) {
        tile::store_float(shared.origin() + row(n) * 4, now);
        tile::store_float(shared.factor(group) + row(n) * 4, factor);
      }
    }
  }

  // Hands the sums of the own keys, by warps, to those who write results.
  MLA_DEVICE void add_sums(const float (&sum)[kOwn]) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const float x = of_row(sum[n], [](float a, float b) { return a + b; });
      if (lane < 4) tile::store_float(shared.sums(group * 4 + warp) + row(n) * 4, x);
    }
    tile::barrier_arrive(shared.summed());
  }

  const AttendArgs& args;
  const L shared;
  const int group, warp, lane;
  Ring<L::kSlots> ring;
  uint32_t items = 0, own_seen = 0, others_seen = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_FP8_SCORER_H_
