#include "proto/wire/fp8/fp8_codec.h"

#include <algorithm>
#include <cmath>

// Compiles a loop for wider vectors too; the version to run is chosen at start. Sanitizers do not
// survive the code that chooses, which runs before them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MLA_SANITIZED)
#define MLA_WIDE_VECTORS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MLA_WIDE_VECTORS
#endif

namespace mla::wire {
namespace {

// Has no branches, so that loops over it are vectorised. NaN codes give 480 here.
inline float Magnitude(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  // A denormal code gets the exponent of the smallest normal number, whose value is then
  // subtracted.
  const uint32_t denormal = magnitude < 8 ? ~0u : 0u;
  const uint32_t exponent = (120u << 23) + (denormal & 1u << 23);
  return std::bit_cast<float>((magnitude << 20) + exponent) -
         std::bit_cast<float>(denormal & 121u << 23);
}

inline uint32_t NaNBits(uint32_t code) { return (code & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u; }

}  // namespace

float Fp8ScaleOf(const float* values, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
    largest = std::max(largest, magnitude < 0x7f800000u ? magnitude : 0u);
  }
  // If the mantissa exceeds 1.75, which is the mantissa of 448, the next exponent is needed.
  const int exponent = static_cast<int>((largest + 0x1fffffu) >> 23) - 127;
  const int scale = exponent - 8;  // 448 = 1.75 x 2^8
  return std::clamp(std::ldexp(1.0f, std::clamp(scale, -120, 120)), kSmallestFp8Scale,
                    kLargestFp8Scale);
}

float EncodeFp8(const float* values, size_t count, uint8_t* codes) {
  const float scale = Fp8ScaleOf(values, count);
  const float inverse = 1.0f / scale;  // exact
  for (size_t i = 0; i < count; ++i) codes[i] = EncodeFp8(values[i] * inverse);
  return scale;
}

MLA_WIDE_VECTORS
void DecodeFp8(const uint8_t* __restrict codes, size_t count, float scale,
               uint16_t* __restrict bf16) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i];
    const auto bits = std::bit_cast<uint32_t>(Magnitude(code) * scale);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    bf16[i] = static_cast<uint16_t>(rounded | NaNBits(code) >> 16 | (code & 0x80u) << 8);
  }
}

MLA_WIDE_VECTORS
void DecodeFp8(const uint8_t* __restrict codes, size_t count, float scale,
               float* __restrict values) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i];
    const auto bits = std::bit_cast<uint32_t>(Magnitude(code) * scale);
    values[i] = std::bit_cast<float>(bits | NaNBits(code) | (code & 0x80u) << 24);
  }
}

}  // namespace mla::wire
