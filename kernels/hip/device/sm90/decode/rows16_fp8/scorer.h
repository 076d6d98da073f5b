// The groups of attend_fp8.h that compute probabilities.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_SCORER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_SCORER_H_

#include "kernels/hip/device/primitives/softmax.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/keys.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/queries.h"

namespace mla::kernels::hip {

// Places scores in a warp. Packed rows are columns of the product, in pairs, and a lane has two
// keys of each.
template <class C>
struct Fp8ScoreColumns {
  static constexpr int kSlots = C::kRows / 4;
  static constexpr int kScoreElems = C::kRows / 2;
  struct Scores {
    float c[kScoreElems];
    MLA_DEVICE float at(int i) const { return c[i]; }
    MLA_DEVICE void set(int i, float x) { c[i] = x; }
  };
  using Softmax = OnlineSoftmax<Fp8ScoreColumns, 1>;

  MLA_DEVICE static constexpr int score_slot(int i) { return (i >> 2) * 2 + (i & 1); }
  // Returns which of the lane's two keys element i belongs to.
  MLA_DEVICE static constexpr int score_key(int i) { return i >> 1 & 1; }
  MLA_DEVICE static float row_max(float x) {
    return of_row(x, [](float a, float b) { return max_f(a, b); });
  }
  MLA_DEVICE static float row_sum(float x) {
    return of_row(x, [](float a, float b) { return a + b; });
  }

 private:
  // Joins a value over the lanes that hold keys of a packed row.
  template <class Join>
  MLA_DEVICE static float of_row(float x, const Join& join) {
    x = join(x, tile::exchange<4>(x));
    x = join(x, tile::exchange<8>(x));
    return join(x, tile::exchange<16>(x));
  }
};

// One of two groups, which takes every second tile of an item. The groups pass origins to each
// other together with the probabilities.
template <class C, class Args = AttendArgs>
class Fp8Scorer {
 public:
  using L = Fp8Layout<C>;

  MLA_DEVICE Fp8Scorer(const Args& a, const L& layout)
      : args(a),
        shared(layout),
        group(tile::wave_index() >> 2),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  // Fields of the item are loaded again where a tile needs them, because keeping them would take
  // registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    const Source source(args, item);
    const int tiles = fp8_tiles<C>(source);
    if (tiles == 0) return;
    begin(item);
    const int unmasked_end = item.limit(0), kv_begin = source.begin;
    const SegmentRecord* const segment = item.segment;
    Softmax softmax;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) softmax.clear(n);
    for (int t = 0; t < tiles; ++t, ring.next()) {
      if ((t & 1) == group) {
        const int first = kv_begin + t * C::kTileKv;
        Scores s;
        const Entries entries(source, first, warp, lane);
        const Scales scales = score(*segment, s[0].c);
        if constexpr (L::kLists) {
          hide(source, entries, first, s[0].c);
        } else if (first + C::kTileKv > unmasked_end) {
          hide(load_item<C::kRows>(args, index, share), first, s[0].c);
        }
        if (t > 0) others_sums(softmax);
        publish(scales, s, softmax);
      }
    }
    if (((tiles - 1) & 1) != group) others_sums(softmax);
    add_sums(softmax);
  }

 private:
  using lds_t = tile::lds_t;
  using Keys = Fp8Keys<C>;
  using Scales = Fp8KeyScales<C>;
  using Source = RowSource<C::kAttention>;
  using Columns = Fp8ScoreColumns<C>;
  using Scores = typename Columns::Scores[1];
  using Softmax = typename Columns::Softmax;
  static constexpr int kProduct = Columns::kScoreElems;  // accumulators of 64 x kRows, of a thread
  static constexpr int kOwn = Columns::kSlots;           // packed rows of a thread, in pairs
  static constexpr float kSlack = 8.0f;                  // probabilities stay below 2^(8 + kShift)
  // Named barriers: of both groups; of group 0 (and kGroup + 1 of group 1).
  static constexpr int kBoth = 1, kGroup = 2;

  static constexpr int kQueryRows = Fp8Queries<C>::kWarpRows;

  // Packed row of element n (0 to kOwn - 1); accumulator 4 (n / 2) + n % 2 is its first.
  MLA_DEVICE int row(int n) const { return 8 * (n >> 1) + 2 * (lane & 3) + (n & 1); }

  MLA_DEVICE void begin(const Item& item) {
#pragma unroll 1
    for (int first = tile::wave_index() * kQueryRows; first < C::kRows;
         first += L::kScoreWarps * kQueryRows) {
      Fp8Queries<C>(item, first, lane).store(shared);
    }
    if (items > 0) tile::barrier_wait(shared.taken(), (items - 1) & 1);
    ++items;

    if (thread_index() < C::kRows) {
      tile::store_float(shared.origin() + thread_index() * 4, negative_infinity());
    }
    tile::publish_shared();
    tile::named_sync<kBoth, 2 * L::kGroupThreads>();
  }

  // Computes scores of the group's next tile, and loads its keys' scales.
  MLA_DEVICE Scales score(const SegmentRecord& segment, float (&s)[kProduct]) const {
    tile::barrier_wait(shared.filled(ring.slot), ring.parity);
    const Scales scales(shared, ring.slot, Keys::key(warp, lane, 0), Keys::key(warp, lane, 1),
                        lane);
    Keys::score(shared, ring.slot, segment, warp, lane, scales, s);
    if (lane == 0) tile::barrier_arrive(shared.emptied(ring.slot));
    return scales;
  }

  // With lists: the entries of this thread's keys.
  struct Entries {
    int of[2];
    MLA_DEVICE Entries(const Source& source, int first, int warp, int lane) {
      if constexpr (L::kLists) {
        of[0] = source.entry(first + Keys::key(warp, lane, 0));
        of[1] = source.entry(first + Keys::key(warp, lane, 1));
      }
    }
  };
  // Hides scores of places that the query row does not see.
  MLA_DEVICE void hide(const Source& source, const Entries& entries, int first,
                       float (&s)[kProduct]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool seen =
          first + Keys::key(warp, lane, half) < source.end && source.sees_entry(entries.of[half]);
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        float& x = s[4 * (n >> 1) + 2 * half + (n & 1)];
        x = seen ? x : negative_infinity();
      }
    }
  }
  // Hides scores that a packed row does not see.
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
  MLA_DEVICE void others_sums(Softmax& softmax) {
    const int other = group ^ 1;
    tile::barrier_wait(shared.published(other), others_seen++ & 1);
    if (tile::load_word_shared(shared.moved(other)) == 0) return;
#pragma unroll
    for (int j = 0; j < kOwn / 2; ++j) {
      float factor[2];
      tile::load_two_floats(factor, shared.factor(other) + row(2 * j) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) softmax.sum[2 * j + e] *= factor[e];
    }
  }

  // Stores probabilities of the own tile and the data that the other groups need with them. Scales
  // of keys are included in the probabilities here, but not in the sums.
  MLA_DEVICE void publish(const Scales& scales, Scores& scores, Softmax& softmax) {
    float(&s)[kProduct] = scores[0].c;
    if constexpr (L::kScaledRows) {
#pragma unroll
      for (int i = 0; i < kProduct; ++i) s[i] += scales.exponent(Columns::score_key(i));
    }
#pragma unroll
    for (int j = 0; j < kOwn / 2; ++j) {
      float pair[2];
      tile::load_two_floats(pair, shared.origin() + row(2 * j) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) softmax.origin[2 * j + e] = pair[e];
    }
    const bool grown = softmax.exceeded(scores, 1.0f, kSlack);
    // The group's previous probabilities are no longer needed.
    if (own_seen > 0) tile::barrier_wait(shared.adopted(group), (own_seen - 1) & 1);
    ++own_seen;
    const bool moved = group_any(grown);
    if (moved) move_origins(scores, softmax);
    if ((thread_index() & (L::kGroupThreads - 1)) == 0) {
      tile::store_word(shared.moved(group), moved ? 1u : 0u);
    }
    float from[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) from[n] = softmax.finite(softmax.origin[n]) - C::kShift;
    softmax.exponentials(scores, 1.0f, from, [&](float p, int i) {
      return L::kScaledRows ? p * scales.inverse(Columns::score_key(i)) : p;
    });
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

  // Origins follow maxima that have grown by more than the slack.
  MLA_DEVICE void move_origins(const Scores& s, Softmax& softmax) const {
    const bool writes = lane < 4;
    float top[kOwn], next[kOwn], from[kOwn], factor[kOwn];
    softmax.maxima(s, top);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (writes) tile::store_float(shared.maxima(group * 4 + warp) + row(n) * 4, top[n]);
    }
    group_sync();
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      top[n] = negative_infinity();
#pragma unroll
      for (int w = 0; w < L::kGroupWarps; ++w) {
        top[n] = max_f(top[n], tile::load_float(shared.maxima(group * 4 + w) + row(n) * 4));
      }
    }
    softmax.targets(top, 1.0f, kSlack, next);
    softmax.move_to(next, from, factor);
    // All warps of the group have read the origins, because they have met since.
    if (writes && warp == 0) {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        tile::store_float(shared.origin() + row(n) * 4, next[n]);
        tile::store_float(shared.factor(group) + row(n) * 4, factor[n]);
      }
    }
  }

  // Passes the sums of the own keys, by warp, to the groups that write results.
  MLA_DEVICE void add_sums(const Softmax& softmax) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const float x = Columns::row_sum(softmax.sum[n]);
      if (lane < 4) tile::store_float(shared.sums(group * 4 + warp) + row(n) * 4, x);
    }
    tile::barrier_arrive(shared.summed());
  }

  const Args& args;
  const L shared;
  const int group, warp, lane;
  Ring<L::kSlots> ring;
  uint32_t items = 0, own_seen = 0, others_seen = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_SCORER_H_
