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
    share(top);

    float from[W::kSlots];
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
    return tile::any(moved);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_COMMON_SOFTMAX_H_
