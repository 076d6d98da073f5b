// Softmax of the expanded form with 8-bit products.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_SOFTMAX_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_SOFTMAX_H_

#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

// Statistics of the two query rows of a warpgroup's lane, over tiles of 128 keys.
//
// In each tile, a row's probabilities are 2^(x - top + kShift), with `top` the row's largest logit
// in that tile, so the largest is not rounded. Sums over tiles use an origin that follows the
// largest logit once that has grown by more than kSlack.
struct CodeSoftmax {
  using Rows = WarpgroupRows<128>;
  static constexpr int kScores = Rows::kScoreElems;
  static constexpr float kShift = 8.0f;  // 2^8 is the power of two below the largest code
  static constexpr float kSlack = 8.0f;

  // Per row of a tile: largest logit, factor from scores to logits, and base of the exponents. For
  // the tile: scale of its values.
  struct Tops {
    float largest[2], scale[2], from[2], value_scale;
  };
  // Factors of a tile to the origin: for older sums, for its own sums, and for its values.
  struct Factors {
    float old[2], now[2], value[2];
    bool moved;
  };

  float origin[2];
  float sum[2];    // sum of probabilities over this lane's keys
  float scale[2];  // from scores to logits, without the keys' scale

  // `of_tile` holds the scales of keys and of values. Keys that a row does not see are hidden.
  MLA_DEVICE Tops tops(const float (&s)[kScores], const float (&of_tile)[2]) const {
    Tops t;
    t.value_scale = of_tile[1];
    maxima(s, t.largest);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      t.scale[slot] = scale[slot] * of_tile[0];
      const bool empty = t.largest[slot] == negative_infinity();
      if (!empty) t.largest[slot] *= t.scale[slot];
      t.from[slot] = (empty ? 0.0f : t.largest[slot]) - kShift;
    }
    return t;
  }

  // Makes probabilities as the operands of the second product: word 2 c + h has row h of keys 16 c
  // and on. Exponentials need only the maxima, so factors are computed at the same time.
  MLA_DEVICE Factors take(const float (&s)[kScores], const Tops& t, uint32_t (&p)[kScores / 4]) {
    float of_tile[2] = {0.0f, 0.0f};
    exponentials(s, t, of_tile, p);
    const Factors f = follow(t);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      sum[slot] = fma_f(of_tile[slot], f.now[slot], sum[slot] * f.old[slot]);
    }
    return f;
  }

  MLA_DEVICE RowScale statistics(int slot) const {
    return RowScale(origin[slot], Rows::row_sum(sum[slot]));
  }

 private:
  // Takes maxima in four independent chains, for latency.
  MLA_DEVICE static void maxima(const float (&s)[kScores], float (&top)[2]) {
    float largest[2][4];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      float& of = largest[i >> 1 & 1][(i >> 1 & 2) + (i & 1)];
      of = i < 8 ? s[i] : max_f(of, s[i]);
    }
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const float(&m)[4] = largest[slot];
      const float of_lane = max_f(max_f(m[0], m[1]), max_f(m[2], m[3]));
      top[slot] = Rows::row_max(max_f(of_lane, negative_infinity()));
    }
  }
  MLA_DEVICE static void exponentials(const float (&s)[kScores], const Tops& t, float (&sums)[2],
                                      uint32_t (&p)[kScores / 4]) {
#pragma unroll
    for (int c = 0; c < kScores / 8; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] =
              exp2_fast(fma_f(s[8 * c + 4 * (i >> 1) + 2 * h + (i & 1)], t.scale[h], -t.from[h]));
        }
        sums[h] += (x[0] + x[1]) + (x[2] + x[3]);
        p[2 * c + h] = tile::pack_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
  }
  // Lets origins follow the maxima of a tile.
  MLA_DEVICE Factors follow(const Tops& t) {
    Factors f;
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const bool follows = t.largest[slot] > origin[slot] + kSlack;
      const float next = follows ? t.largest[slot] : origin[slot];
      const float counted = next == negative_infinity() ? 0.0f : next;
      f.old[slot] = follows ? exp2_fast(origin[slot] - counted) : 1.0f;
      f.now[slot] = exp2_fast(t.largest[slot] - counted - kShift);
      f.value[slot] = f.now[slot] * t.value_scale;
      origin[slot] = next;
      moved |= follows;
    }
    f.moved = tile::any(moved);
    return f;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_SOFTMAX_H_
