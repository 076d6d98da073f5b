// Rounding of queries and of probabilities to 8 bits, for tile::CodeWave. docs/fp8.md says by how
// much.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_

#include "kernels/formats/kv_format.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

template <class W>
struct CodeQueries {
  static constexpr int kChunks = W::kLaneCodes / 8;  // of the lane's values of a step

  // Queries of a row over a power of two that brings its largest magnitude to at most the largest
  // code and more than half of that. Those that are not finite make all of their row NaN.
  // `load(values, step)` loads the lane's bf16 values of a step, in the order of the operand; it is
  // called twice for each. Returns what is left to multiply logits with: the power, or 1 where
  // products take it along.
  template <int kSteps, class Load>
  MLA_DEVICE static float round(typename W::Q (&codes)[kSteps], const Load& load) {
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
    // A NaN is as bad as an infinity, and only that is greater than all others as a number.
    largest = largest < kInfinityBits ? largest : kInfinityBits;
    largest = float_to_bits(W::row_max(bits_to_float(largest)));
    const bool finite = largest < kInfinityBits;
    const float power = KvGroupScale(bits_to_float(finite ? largest : 0), kPoolFp8);
    const float inverse = finite ? KvScaleInverse(power) : bits_to_float(0x7fc00000u);
    // Loaded again: there are not the registers to keep them.
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

// Probabilities of the rows of a wave as codes, and their sums as they are multiplied. update()
// takes scores of a tile and leaves in their place probabilities to be rounded, each row's over a
// power of two; as OnlineSoftmax::update else. make_p() makes the operand of a step and adds it up.
template <class W, bool kOfTiles = W::kTakesPowers>
class CodeSums;

// Where products take a power of two along, each tile has its own: that which brings the row's
// largest probability of the tile to at most 2^8 and more than 2^7.
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
  int exponent;  // plus 127, of what takes the tile's power back
};

// Where they do not, all tiles of a row share one power, which is the origin of the exponentials:
// they are at most 2^slack, and an origin that follows a maximum brings it to 2^kPlace. Codes below
// 2^-7 lose digits, so an origin also goes down, kDown powers at a time, where the mean of what has
// been summed is less than kMean: many small probabilities beside few large ones.
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
  float least;  // the sum that the keys so far should have
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_CODE_ROUNDING_H_
