// Encodes and decodes eight-bit floats on the wire: OCP e4m3fn codes (exponent bias 7, largest 448,
// NaN 0x7f and 0xff, no infinity) together with fp32 scales. A value is its code times its scale.
//
// Scales that EncodeFp8 chooses are powers of two, so its values are decoded to bf16 without
// another rounding. Let L be the largest value that shares a scale. A value of at least L * 2^-13
// is off by at most 2^-4 of itself, a smaller one by at most L * 2^-17.
//
// Pure functions; any thread.
#ifndef MLA_PROTO_WIRE_FP8_FP8_CODEC_H_
#define MLA_PROTO_WIRE_FP8_FP8_CODEC_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace mla::wire {

// Scales outside of these bounds are refused.
inline constexpr float kSmallestFp8Scale = 0x1p-100f;
inline constexpr float kLargestFp8Scale = 0x1p72f;

// Returns false for NaN, too.
constexpr bool IsFp8Scale(float scale) {
  return scale >= kSmallestFp8Scale && scale <= kLargestFp8Scale;
}

// Rounds to nearest, ties to even; magnitudes above 448, infinities included, become 448; NaN stays
// NaN.
constexpr uint8_t EncodeFp8(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<uint32_t>(448.0f)) return static_cast<uint8_t>(sign | 0x7eu);
  const auto positive = std::bit_cast<float>(magnitude);
  uint32_t code = 0;
  if (positive < 0x1p-6f) {
    // Denormal codes count units of 2^-9, and so does the mantissa of this sum.
    code = std::bit_cast<uint32_t>(positive + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(code == 0 ? 0 : sign | code);
}

// Returns the smallest power of two within the bounds of scales under which none of the values
// saturates. Infinities and NaN do not count. Magnitudes above 448 x kLargestFp8Scale always
// saturate.
float Fp8ScaleOf(const float* values, size_t count);

// Writes the codes of `count` values and returns their scale, Fp8ScaleOf.
float EncodeFp8(const float* values, size_t count, uint8_t* codes);

// Writes codes times scale, rounded to bf16 (nearest, ties to even). A code that is NaN becomes
// NaN. REQUIRES IsFp8Scale(scale).
void DecodeFp8(const uint8_t* codes, size_t count, float scale, uint16_t* bf16);
// Writes codes times scale as fp32.
void DecodeFp8(const uint8_t* codes, size_t count, float scale, float* values);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_FP8_FP8_CODEC_H_
