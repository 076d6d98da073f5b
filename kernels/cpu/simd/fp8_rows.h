// Widens rows of 8-bit formats to bf16 rows, by table; see fp32_kernels.h for how it is included.
//
// All levels share the driver, which finds the scales of a row, and the path for scales that no
// encoder here writes. A level brings its own loop for scales that are powers of two.
#ifndef MLA_KERNELS_CPU_SIMD_FP8_ROWS_H_
#define MLA_KERNELS_CPU_SIMD_FP8_ROWS_H_

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/simd/kernel_set.h"

namespace mla::kernels::cpu {
namespace {

constexpr uint32_t kLargestScaleBits = (127u + 72) << 23;    // kLargestKvScale
constexpr uint32_t kSmallestScaleBits = (127u - 100) << 23;  // kSmallestKvScale
constexpr uint16_t kBf16NaN = 0x7fc0;
// The magnitudes of the denormal codes: 0 to 7 units of 2^-9.
constexpr uint16_t kBf16Units[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

constexpr uint16_t Bf16OfMagnitude(uint32_t magnitude) {
  if (magnitude == 0x7f) return kBf16NaN;
  return static_cast<uint16_t>(magnitude < 8 ? kBf16Units[magnitude] : (magnitude << 4) + 0x3c00);
}

struct Bf16Table {
  uint16_t of[256];
};

constexpr Bf16Table MakeBf16Table() {
  Bf16Table table{};
  for (uint32_t code = 0; code < 256; ++code) {
    table.of[code] = static_cast<uint16_t>(Bf16OfMagnitude(code & 0x7f) | (code & 0x80) << 8);
  }
  return table;
}

constexpr Bf16Table kBf16OfCode = MakeBf16Table();

// Returns code times scale as bf16, for any scale.
inline uint16_t WidenCode(uint8_t code, float scale) {
  uint32_t bits = static_cast<uint32_t>(kBf16OfCode.of[code & 0x7f]) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  value *= scale;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return kBf16NaN;
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(rounded | (code & 0x80u) << 8);
}

// Returns the bits of a group's scale in row r, as fp32.
inline uint32_t ScaleBits(const Fp8RowsArgs& args, int32_t r, int32_t group) {
  uint32_t bits;
  if (args.exponents != nullptr) {
    const uint32_t exponent = args.exponents[r][group];
    return exponent == 0 ? 1u << 22 : exponent << 23;  // 2^-127 is denormal
  }
  memcpy(&bits, args.rows[r] + args.scales_at + 4 * group, sizeof bits);
  return bits;
}

// Calls `widen(codes, count, shift, out)`, which stores `count` codes, times 2^shift, as bf16, and
// nothing after them. Neighbouring groups with the same scale share one call; in most rows all
// groups do.
template <typename Widen>
inline void WidenRows(const Fp8RowsArgs& args, const Widen& widen) {
  for (int32_t r = 0; r < args.count; ++r) {
    const uint8_t* row = args.rows[r];
    uint16_t* out = args.out + r * args.ld;
    uint16_t* rope = out + args.latent_dim;
    if (args.group == 0) {
      widen(row, args.latent_dim, 0, out);
      widen(row + args.rope_at, args.rope_dim, 0, rope);
      continue;
    }
    for (int32_t i = 0, next = 0, group = 0; i < args.latent_dim; i = next) {
      const uint32_t bits = ScaleBits(args, r, group);
      do {
        next += args.group;
        ++group;
      } while (next < args.latent_dim && ScaleBits(args, r, group) == bits);
      const int32_t run = (next < args.latent_dim ? next : args.latent_dim) - i;
      if (bits >= kSmallestScaleBits && bits <= kLargestScaleBits && (bits & 0x7fffffu) == 0) {
        widen(row + i, run, static_cast<int32_t>(bits >> 23) - 127, out + i);
        continue;
      }
      // The value of the scale (KvScale): NaN unless it lies in [0, largest].
      float scale = __builtin_nanf("");
      if (bits <= kLargestScaleBits) memcpy(&scale, &bits, sizeof scale);
      for (int32_t k = 0; k < run; ++k) out[i + k] = WidenCode(row[i + k], scale);
    }
    memcpy(rope, row + args.rope_at, static_cast<size_t>(args.rope_dim) * 2);
  }
}

// The loop of levels without one of their own. Zero and NaN do not change.
inline void WidenByTable(const uint8_t* codes, int32_t count, int32_t shift, uint16_t* out) {
  for (int32_t i = 0; i < count; ++i) out[i] = kBf16OfCode.of[codes[i]];
  if (shift == 0) return;
  const auto exponent = static_cast<int16_t>(shift * 128);
  for (int32_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<int16_t>(out[i] & 0x7fff);
    const bool scaled = magnitude > 0 && magnitude < 0x7f80;
    out[i] = static_cast<uint16_t>(out[i] + (scaled ? exponent : 0));
  }
}

}  // namespace
}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_SIMD_FP8_ROWS_H_
