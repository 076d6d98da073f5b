// Rounding of queries and of probabilities to 8 bits, for tile::CodeWave. docs/fp8.md says by how
// much.
#ifndef MLA_KERNELS_HIP_GFX950_CODE_ROUNDING_H_
#define MLA_KERNELS_HIP_GFX950_CODE_ROUNDING_H_

#include "kernels/formats/kv_format.h"
#include "kernels/hip/gfx950/code_wave.h"

namespace mla::kernels::hip {

struct CodeRounding {
  using W = tile::CodeWave;
  static constexpr int kValueChunks = W::kLaneCodes / 8;
  static constexpr uint32_t kInfinityBits = 0x7f800000u;

  // Queries of a row over a power of two that brings its largest magnitude to at most 448 and more
  // than 224. Those that are not finite make all of their row NaN. `load(values, step)` loads the
  // lane's bf16 values of a step, in the order of the operand; it is called twice for each.
  template <int kSteps, class Load>
  MLA_DEVICE static void queries(W::Q (&codes)[kSteps], const Load& load) {
    uint32_t largest = 0;  // the bits of a magnitude
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Chunk values[kValueChunks];
      load(values, s);
#pragma unroll
      for (int i = 0; i < 4 * kValueChunks; ++i) {
        const uint32_t pair = values[i / 4].w[i % 4];
        largest = greater(largest, greater(pair & 0x7fff0000u, pair << 16 & 0x7fffffffu));
      }
    }
    const tile::Two halves = tile::with_other_half(bits_to_float(largest));
    largest = greater(float_to_bits(halves.x), float_to_bits(halves.y));
    const bool finite = largest < kInfinityBits;
    const float power = KvGroupScale(bits_to_float(finite ? largest : 0), Fp8Kind::kE4m3Fn);
    const float inverse = finite ? KvScaleInverse(power) : bits_to_float(0x7fc00000u);
    const int exponent = static_cast<int>(float_to_bits(power) >> 23);
    // Loaded again: there are not the registers to keep them.
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      schedule_fence();
      Chunk values[kValueChunks];
      load(values, s);
      codes[s].exponent = exponent;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t a = values[i / 2].w[i % 2 * 2], b = values[i / 2].w[i % 2 * 2 + 1];
        codes[s].r[i] =
            W::codes(low(a) * inverse, high(a) * inverse, low(b) * inverse, high(b) * inverse);
      }
    }
  }

  // Probabilities in place of scores, of each row times a power of two that brings its largest in
  // the tile to at most 2^8 and more than 2^7; `exponent`: plus 127, of what takes that back. As
  // OnlineSoftmax::update else.
  template <class Softmax, int kFragments>
  MLA_DEVICE static bool update(Softmax& softmax, W::Scores (&s)[kFragments], float scale,
                                float slack, float (&factor)[W::kSlots], int& exponent) {
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

 private:
  static constexpr float kMostPower = 8.0f, kLargestPower = 120.0f;
  MLA_DEVICE static uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }
  MLA_DEVICE static float low(uint32_t pair) { return bits_to_float(pair << 16); }
  MLA_DEVICE static float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_GFX950_CODE_ROUNDING_H_
