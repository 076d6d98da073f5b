// The softmax of attention over keys that come tile by tile.
#ifndef MLA_KERNELS_HIP_COMMON_SOFTMAX_H_
#define MLA_KERNELS_HIP_COMMON_SOFTMAX_H_

#include "kernels/hip/common/vendor.h"

namespace mla::kernels::hip {

// Statistics of a wave's rows. Probabilities are 2^(score x scale - origin): any origin gives the
// same quotient, so it follows a row's maximum only when that has grown by more than `slack` powers
// of two, and accumulators are hardly ever rescaled.
template <class W, int kFragments>
struct OnlineSoftmax {
  float origin[W::kSlots];
  float sum[W::kSlots];  // of this lane's columns

  MLA_DEVICE void clear(int slot) {
    origin[slot] = negative_infinity();
    sum[slot] = 0.0f;
  }

  // Takes scores, -inf where a row does not see the key, and leaves probabilities in their place.
  // Whether an origin has moved: then outputs are to be multiplied with `factor`. `scale`:
  // positive, of the scores, log2(e) included. `share(top)` makes maxima of a wave's columns those
  // of rows.
  template <class Share>
  MLA_DEVICE bool update(typename W::Scores (&s)[kFragments], float scale, float slack,
                         float (&factor)[W::kSlots], const Share& share) {
    float top[W::kSlots];
    maxima(s, top);
    share(top);

    float from[W::kSlots];
    const bool moved = follow(top, scale, slack, from, factor);
    exponentials(s, scale, from);
    return tile::any(moved);
  }

  // Where waves share rows, without an exchange in most tiles: whether an origin has to follow this
  // wave's scores; if not, probabilities in place of the scores; and the same as update() for those
  // probabilities where another wave's scores make an origin move.
  MLA_DEVICE bool would_move(const typename W::Scores (&s)[kFragments], float scale,
                             float slack) const {
    float top[W::kSlots];
    maxima(s, top);
    bool moves = false;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      moves |= top[slot] * scale > origin[slot] + slack;
    }
    return tile::any(moves);
  }
  MLA_DEVICE void stay(typename W::Scores (&s)[kFragments], float scale) {
    float from[W::kSlots];
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      from[slot] = origin[slot] == negative_infinity() ? 0.0f : origin[slot];
    }
    exponentials(s, scale, from);
  }

  template <class Share>
  MLA_DEVICE bool follow_others(typename W::Scores (&s)[kFragments], float scale, float slack,
                                float (&factor)[W::kSlots], const Share& share) {
    float top[W::kSlots], from[W::kSlots];
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = negative_infinity();
    share(top);
    const bool moved = follow(top, scale, slack, from, factor);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        s[f].set(i, s[f].at(i) * factor[W::score_slot(i)]);
      }
    }
    return tile::any(moved);
  }

 private:
  // Whether one of this lane's origins has moved; what exponentials count from now.
  MLA_DEVICE bool follow(const float (&top)[W::kSlots], float scale, float slack,
                         float (&from)[W::kSlots], float (&factor)[W::kSlots]) {
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const float most = top[slot] * scale;
      const bool follows = most > origin[slot] + slack;
      const float now = follows ? most : origin[slot];
      from[slot] = now == negative_infinity() ? 0.0f : now;
      factor[slot] = exp2_fast(origin[slot] - from[slot]);
      moved |= follows;
      origin[slot] = now;
      sum[slot] *= factor[slot];
    }
    return moved;
  }
  MLA_DEVICE static void maxima(const typename W::Scores (&s)[kFragments],
                                float (&top)[W::kSlots]) {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = negative_infinity();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        top[W::score_slot(i)] = max_f(top[W::score_slot(i)], s[f].at(i));
      }
    }
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) top[slot] = W::row_max(top[slot]);
  }
  MLA_DEVICE void exponentials(typename W::Scores (&s)[kFragments], float scale,
                               const float (&from)[W::kSlots]) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        const int slot = W::score_slot(i);
        if (i % 4 == 0) schedule_fence();
        const float p = exp2_fast(fma_f(s[f].at(i), scale, -from[slot]));
        sum[slot] += p;
        s[f].set(i, p);
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_COMMON_SOFTMAX_H_
