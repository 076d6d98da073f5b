// The softmax of attention over keys that come tile by tile.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_SOFTMAX_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_SOFTMAX_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// Statistics of the rows of which a lane has scores. Probabilities are 2^(score x scale - origin):
// any origin gives the same quotient, so it follows a row's maximum only when that has grown by
// more than `slack` powers of two, and accumulators are hardly ever rescaled.
//
// W: how scores lie in a wave or warpgroup. Scores, kScoreElems of them a fragment; kSlots rows of
// a lane, score_slot(i) that of element i; row_max(x): over the lanes that share a row. `scale`:
// positive, of the scores, log2(e) included.
template <class W, int kFragments>
struct OnlineSoftmax {
  using Scores = typename W::Scores[kFragments];
  using Slots = float[W::kSlots];

  Slots origin;
  Slots sum;  // of this lane's columns

  MLA_DEVICE void clear(int slot) {
    origin[slot] = negative_infinity();
    sum[slot] = 0.0f;
  }

  // Takes scores, -inf where a row does not see the key, and leaves probabilities in their place.
  // Whether an origin has moved: then outputs are to be multiplied with `factor`. `share(top)`
  // makes maxima of a wave's columns those of rows.
  template <class Share>
  MLA_DEVICE bool update(Scores& s, float scale, float slack, Slots& factor, const Share& share) {
    Slots top, next, from;
    maxima(s, top);
    share(top);
    const bool moved = targets(top, scale, slack, next);
    move_to(next, from, factor);
    exponentials(s, scale, from, [](float p, int) { return p; });
    return tile::any(moved);
  }

  // Where waves share rows, without an exchange in most tiles: whether an origin has to follow this
  // lane's scores; if none of any lane, exponentials() in place of the scores; and else the same as
  // update() for those probabilities where another wave's scores make an origin move.
  MLA_DEVICE bool exceeded(const Scores& s, float scale, float slack) const {
    Slots top;
    lane_maxima(s, top);
    bool exceeds = false;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      exceeds |= top[slot] * scale > origin[slot] + slack;
    }
    return exceeds;
  }
  template <class Share>
  MLA_DEVICE bool follow_others(Scores& s, float scale, float slack, Slots& factor,
                                const Share& share) {
    Slots top, next, from;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = negative_infinity();
    share(top);
    const bool moved = targets(top, scale, slack, next);
    move_to(next, from, factor);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        s[f].set(i, s[f].at(i) * factor[W::score_slot(i)]);
      }
    }
    return tile::any(moved);
  }

  // What exponentials count from: a row without keys so far has probabilities of zero.
  MLA_DEVICE static float finite(float x) { return x == negative_infinity() ? 0.0f : x; }

  // --- The steps of update(), for those who have work between them.
  // Of a row's columns in all lanes that share it.
  MLA_DEVICE static void maxima(const Scores& s, Slots& top) {
    lane_maxima(s, top);
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = W::row_max(top[slot]);
  }
  // The origins that rows with these maxima want. Whether one of this lane's differs.
  MLA_DEVICE bool targets(const Slots& top, float scale, float slack, Slots& next) const {
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const float most = top[slot] * scale;
      const bool follows = most > origin[slot] + slack;
      next[slot] = slack == 0.0f ? max_f(origin[slot], most) : follows ? most : origin[slot];
      moved |= follows;
    }
    return moved;
  }
  // Sums follow; whatever else was summed is to be multiplied with `factor`. `from`: what
  // exponentials count from.
  MLA_DEVICE void move_to(const Slots& next, Slots& from, Slots& factor) {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      from[slot] = finite(next[slot]);
      factor[slot] = exp2_fast(origin[slot] - from[slot]);
      origin[slot] = next[slot];
      sum[slot] *= factor[slot];
    }
  }
  // Probabilities in place of scores. weight(p, i): what a probability of element i adds to sums.
  template <class Weight>
  MLA_DEVICE void exponentials(Scores& s, float scale, const Slots& from, const Weight& weight) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const int slot = W::score_slot(i);
        if (i % 4 == 0) schedule_fence();
        const float p = exp2_fast(fma_f(s[f].at(i), scale, -from[slot]));
        sum[slot] += weight(p, i);
        s[f].set(i, p);
      }
    }
  }
  MLA_DEVICE void exponentials(Scores& s, float scale) {
    Slots from;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) from[slot] = finite(origin[slot]);
    exponentials(s, scale, from, [](float p, int) { return p; });
  }

 private:
  MLA_DEVICE static void lane_maxima(const Scores& s, Slots& top) {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = negative_infinity();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        top[W::score_slot(i)] = max_f(top[W::score_slot(i)], s[f].at(i));
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_PRIMITIVES_SOFTMAX_H_
