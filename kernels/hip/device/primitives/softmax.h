// Computes the softmax of attention over keys that come tile by tile.
#ifndef MLA_KERNELS_HIP_DEVICE_PRIMITIVES_SOFTMAX_H_
#define MLA_KERNELS_HIP_DEVICE_PRIMITIVES_SOFTMAX_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip {

// Keeps the statistics of the rows whose scores a lane holds. Probabilities are 2^(score x scale -
// origin). Any origin gives the same quotient, so it follows a row's maximum only when that has
// grown by more than `slack` powers of two. Accumulators are then rarely rescaled.
//
// W describes how scores lie in a wave or warpgroup: kScoreElems scores a fragment, kSlots rows a
// lane; score_slot(i) is the row of element i, and row_max(x) the maximum over the lanes that share
// a row. `scale` is the positive factor of the scores, log2(e) included.
template <class W, int kFragments>
struct OnlineSoftmax {
  using Scores = typename W::Scores[kFragments];
  using Slots = float[W::kSlots];

  Slots origin;
  Slots sum;  // over this lane's columns

  MLA_DEVICE void clear(int slot) {
    origin[slot] = negative_infinity();
    sum[slot] = 0.0f;
  }

  // Takes scores, -inf where a row does not see the key, and replaces them by probabilities.
  // Returns true if an origin has moved; outputs must then be multiplied with `factor`.
  // `share(top)` turns maxima over a wave's columns into maxima over rows.
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

  // For waves that share rows, so that most tiles need no exchange: returns true if this lane's
  // scores must move an origin. If no lane's do, the caller uses exponentials(); otherwise
  // update(). Waves that have called exponentials() already call
  // follow_others() if another wave's scores move an origin.
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

  // Returns the origin from which exponentials are computed. A row without keys so far gets
  // probabilities of zero.
  MLA_DEVICE static float finite(float x) { return x == negative_infinity() ? 0.0f : x; }

  // --- The steps of update(), for callers that have work between them.
  // Maxima of rows, over all lanes that share a row.
  MLA_DEVICE static void maxima(const Scores& s, Slots& top) {
    lane_maxima(s, top);
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = W::row_max(top[slot]);
  }
  // Computes the origins for these row maxima. Returns true if one of this lane's origins changes.
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
  // Moves the origins and rescales the sums. The caller multiplies its other sums with `factor`.
  // `from` receives the origins for exponentials.
  MLA_DEVICE void move_to(const Slots& next, Slots& from, Slots& factor) {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      from[slot] = finite(next[slot]);
      factor[slot] = exp2_fast(origin[slot] - from[slot]);
      origin[slot] = next[slot];
      sum[slot] *= factor[slot];
    }
  }
  // Replaces scores by probabilities. weight(p, i) is what probability p of element i adds to sums.
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
