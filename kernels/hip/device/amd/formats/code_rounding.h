// Rounds queries and probabilities to 8 bits, for tile::CodeWave. docs/fp8.md states the error.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_

#include "kernels/formats/kv_format.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

template <class W>
struct CodeQueries {
  static constexpr int kChunks = W::kLaneCodes / 8;  // chunks of the lane's values of a step

  // Rounds a row's queries, divided by a power of two that brings their largest magnitude to at
  // most the largest code and to more than half of it. A query that is not finite makes all of its
  // row NaN. `load(values, step)` loads the lane's bf16 values of a step, in the order of the
  // operand; it is called twice for each step. Returns the remaining factor of the logits: the
  // power, or 1 if products apply it. Steps from kSteps on are left alone.
  template <int kSteps, class Load>
  MLA_DEVICE static float round(typename W::Q* codes, const Load& load) {
    uint32_t largest = 0;  // the bits of a magnitude
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Chunk values[kChunks];
      load(values, s);
#pragma unroll
      for (int i = 0; i < 4 * kChunks; ++i) {
        const uint32_t pair = values[i / 4].w[i % 4];
        largest = greater(largest, greater(pair & 0x7fff0000u, pair << 16 & 0x7fffffffu));
      }
    }
    // NaN is treated as an infinity, because row_max compares numbers and would drop a NaN.
    largest = largest < kInfinityBits ? largest : kInfinityBits;
    largest = float_to_bits(W::row_max(bits_to_float(largest)));
    const bool finite = largest < kInfinityBits;
    const float power = KvGroupScale(bits_to_float(finite ? largest : 0), kPoolFp8);
    const float inverse = finite ? KvScaleInverse(power) : bits_to_float(0x7fc00000u);
    // Loads the values again, because there are not enough registers to keep them.
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      schedule_fence();
      Chunk values[kChunks];
      load(values, s);
      if constexpr (W::kTakesPowers) {
        codes[s].exponent = static_cast<int>(float_to_bits(power) >> 23);
      }
#pragma unroll
      for (int i = 0; i < W::kLaneCodes / 4; ++i) {
        const uint32_t a = values[i / 2].w[i % 2 * 2], b = values[i / 2].w[i % 2 * 2 + 1];
        codes[s].r[i] =
            W::codes(low(a) * inverse, high(a) * inverse, low(b) * inverse, high(b) * inverse);
      }
    }
    return W::kTakesPowers ? 1.0f : power;
  }

 private:
  static constexpr uint32_t kInfinityBits = 0x7f800000u;
  MLA_DEVICE static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }
  MLA_DEVICE static float low(uint32_t pair) { return bits_to_float(pair << 16); }
  MLA_DEVICE static float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
};

// Makes a wave's probabilities codes, and adds up the rounded values. update() works as
// OnlineSoftmax::update, except that it leaves probabilities divided by a power of two of their
// row, ready to be rounded. make_p() makes the operand of a step and adds it to the sums.
template <class W, bool kOfTiles = W::kTakesPowers>
class CodeSums;

// If products take a power of two, each tile has its own. It brings the row's largest probability
// in the tile to at most 2^8 and to more than 2^7.
template <class W>
class CodeSums<W, true> {
 public:
  MLA_DEVICE void clear() { W::clear(sums); }
  MLA_DEVICE void begin_with(float sum) { W::fill(sums, sum); }
  MLA_DEVICE void scale(const float (&factor)[W::kSlots]) { W::scale(sums, factor); }
  MLA_DEVICE float total() const { return W::total(sums); }

  template <class Softmax, int kFragments>
  MLA_DEVICE bool update(Softmax& softmax, typename W::Scores (&s)[kFragments], float scale,
                         float slack, float (&factor)[W::kSlots]) {
    float top[W::kSlots], next[W::kSlots], from[W::kSlots];
    softmax.maxima(s, top);
    const bool moved = softmax.targets(top, scale, slack, next);
    softmax.move_to(next, from, factor);
    const float most = fma_f(top[0], scale, -from[0]);
    const float wanted = kMostPower - tile::round_up(most);
    const float power = max_f(0.0f, wanted < kLargestPower ? wanted : kLargestPower);
    from[0] -= power;
    const float before = softmax.sum[0];
    softmax.sum[0] = 0.0f;
    softmax.exponentials(s, scale, from, [](float p, int) { return p; });
    exponent = 127 - static_cast<int>(power);
    softmax.sum[0] =
        fma_f(softmax.sum[0], bits_to_float(static_cast<uint32_t>(exponent) << 23), before);
    return tile::any(moved);
  }
  template <int kFragments>
  MLA_DEVICE void make_p(typename W::P& p, const typename W::Scores (&s)[kFragments], int step) {
    W::make_p(p, s, step);
    p.exponent = exponent;
    W::add_up(sums, p);
  }

 private:
  static constexpr float kMostPower = 8.0f, kLargestPower = 120.0f;
  typename W::Sums sums;
  int exponent;  // exponent that restores the tile's power, plus 127
};

// If products take no power, all tiles of a row share one, which is the origin of the exponentials.
// Exponentials are at most 2^slack, and an origin that follows a maximum brings it to 2^kPlace.
// Codes below 2^-7 lose digits. So an origin also goes down, by kDown powers at a time, if the mean
// of the summed probabilities is less than kMean: many small probabilities and few large ones.
template <class W>
class CodeSums<W, false> {
 public:
  MLA_DEVICE void clear() {
    W::clear(sums);
    least = 0.0f;
  }
  MLA_DEVICE void scale(const float (&factor)[W::kSlots]) { W::scale(sums, factor); }
  MLA_DEVICE float total() const { return W::total(sums); }

  template <class Softmax, int kFragments>
  MLA_DEVICE bool update(Softmax& softmax, typename W::Scores (&s)[kFragments], float scale,
                         float slack, float (&factor)[W::kSlots]) {
    float top[W::kSlots], next[W::kSlots], from[W::kSlots];
    const float sum = total();
    softmax.maxima(s, top);
    const float most = top[0] * scale, origin = softmax.origin[0];
    const float base = sum < least ? origin - kDown : origin;
    next[0] = most > base + slack ? most - kPlace : base;
    const bool moved = next[0] != origin;
    softmax.move_to(next, from, factor);
    softmax.exponentials(s, scale, from, [](float p, int) { return p; });
    least += kFragments * W::kScoreCols * kMean;
    return tile::any(moved);
  }
  template <int kFragments>
  MLA_DEVICE void make_p(typename W::P& p, const typename W::Scores (&s)[kFragments], int step) {
    W::make_p(p, s, step);
    W::add_up(sums, p);
  }

 private:
  static constexpr float kPlace = 3.0f, kDown = 4.0f, kMean = 0x1p-5f;
  typename W::Sums sums;
  float least;  // least sum that the keys so far should have
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_
