// Encodes and decodes eight-bit floats of KV rows: 4 exponent bits, 3 mantissa bits, as two vendors
// define them.
//
//   kE4m3Fn    OCP e4m3fn: exponent bias 7, largest 448, NaN 0x7f and 0xff, no infinity
//   kE4m3Fnuz  e4m3fnuz: exponent bias 8, NaN 0x80 alone, no infinity, no negative zero
//
// The same byte is twice as large in kE4m3Fn. Encoders write only bytes that both kinds read as
// numbers: no negative zero (0x80), and nothing above 0x7e in magnitude. The largest number written
// is therefore 448 in kE4m3Fn and 224 in kE4m3Fnuz. Conversion between the kinds is then exact: all
// bytes except NaN stay, and scales double or halve (ToKind, ScaleToKind).
//
// Everything here may be used by device code.
#ifndef MLA_KERNELS_FORMATS_FP8_H_
#define MLA_KERNELS_FORMATS_FP8_H_

#include <bit>
#include <cstdint>

namespace mla::kernels {

enum class Fp8Kind : uint8_t {
  kE4m3Fn = 1,    // gfx950, sm_90, CPUs
  kE4m3Fnuz = 2,  // gfx942
};

constexpr const char* Name(Fp8Kind kind) {
  return kind == Fp8Kind::kE4m3Fn ? "e4m3fn" : "e4m3fnuz";
}

inline constexpr uint8_t kFp8LargestCode = 0x7e;

constexpr uint8_t Fp8NaN(Fp8Kind kind) { return kind == Fp8Kind::kE4m3Fn ? 0x7f : 0x80; }

constexpr bool IsFp8NaN(uint8_t code, Fp8Kind kind) {
  return kind == Fp8Kind::kE4m3Fn ? (code & 0x7f) == 0x7f : code == 0x80;
}

// Returns the largest number that EncodeFp8 writes.
constexpr float Fp8Largest(Fp8Kind kind) { return kind == Fp8Kind::kE4m3Fn ? 448.0f : 224.0f; }

// Returns the exact value. Exponent and mantissa move to their places in binary32. The product then
// corrects the bias, and turns denormal codes into normal numbers.
constexpr float DecodeFp8(uint8_t code, Fp8Kind kind) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  if (IsFp8NaN(code, kind)) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float bias = kind == Fp8Kind::kE4m3Fn ? 0x1p120f : 0x1p119f;
  return std::bit_cast<float>(sign | static_cast<uint32_t>(code & 0x7f) << 20) * bias;
}

// Rounds to nearest, ties to even. Magnitudes above the largest number, infinities included, become
// the largest. NaN stays NaN, and values that round to zero become +0.
constexpr uint8_t EncodeFp8(float value, Fp8Kind kind) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Fp8NaN(kind);
  const uint32_t largest = std::bit_cast<uint32_t>(Fp8Largest(kind));
  if (magnitude > largest) magnitude = largest;
  // The steps below encode kE4m3Fn. A code means half as much in kE4m3Fnuz, so that kind gets the
  // code of twice the number.
  const float number = std::bit_cast<float>(magnitude) * (kind == Fp8Kind::kE4m3Fn ? 1.0f : 2.0f);
  uint32_t code = 0;
  if (number < 0x1p-6f) {
    // Below the smallest normal number, codes count units of 2^-9, and so does the mantissa of this
    // sum.
    code = std::bit_cast<uint32_t>(number + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  } else {
    const uint32_t n = std::bit_cast<uint32_t>(number);
    code = ((n + 0x7ffffu + (n >> 20 & 1u)) >> 20) - (120u << 3);
  }
  const uint32_t sign = code == 0 ? 0 : bits >> 24 & 0x80u;
  return static_cast<uint8_t>(sign | code);
}

// Returns the byte of kind `to` that has the value of `code` in the other kind, after ScaleToKind
// has changed the scale. Bytes that encoders do not write become the nearest that they do.
constexpr uint8_t ToKind(uint8_t code, Fp8Kind to) {
  const Fp8Kind from = to == Fp8Kind::kE4m3Fn ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
  if (IsFp8NaN(code, from)) return Fp8NaN(to);
  if ((code & 0x7f) == 0) return 0;
  if ((code & 0x7f) > kFp8LargestCode) return static_cast<uint8_t>((code & 0x80) | 0x7e);
  return code;
}

constexpr float ScaleToKind(float scale, Fp8Kind to) {
  return to == Fp8Kind::kE4m3Fn ? scale * 0.5f : scale * 2.0f;
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_FP8_H_
