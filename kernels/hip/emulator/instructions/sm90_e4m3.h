// Emulates the instructions of kernels/hip/device/sm90/e4m3_instructions.h on the host.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_E4M3_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_E4M3_H_

#include "kernels/hip/emulator/instructions/sm90_fp8.h"

namespace mla::kernels::hip::tile {

inline uint32_t e4m3_code(float x) { return kernels::EncodeFp8(x, kernels::Fp8Kind::kE4m3Fn); }
inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  return e4m3_code(x0) | e4m3_code(x1) << 8 | e4m3_code(x2) << 16 | e4m3_code(x3) << 24;
}
inline uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  const auto product = [&](int shift) {
    return host::WideBf16(static_cast<uint16_t>(a >> shift)) *
           host::WideBf16(static_cast<uint16_t>(b >> shift));
  };
  return pack_bf16(product(0), product(16));
}
inline uint32_t less_of_f16_pairs(uint32_t a, uint32_t b) {
  const auto less = [&](int shift) {
    const float x = f16_to_float(a >> shift), y = f16_to_float(b >> shift);
    return x != x ? y : y < x ? y : x;
  };
  return pack_f16(less(0), less(16));
}
inline float reciprocal(float x) { return 1.0f / x; }
template <uint32_t kSelector>
uint32_t choose_bytes(uint32_t a, uint32_t b) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> 8 * (kSelector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}

inline void multiply_e4m3(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 64, accumulate != 0, false, false, a, {}, b, 0, host::Element::kE4m3});
}
inline void multiply_e4m3(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  host::StartProduct({c, 128, accumulate != 0, false, false, a, {}, b, 0, host::Element::kE4m3});
}
inline void multiply_held_e4m3(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  host::StartProduct({c,
                      64,
                      accumulate != 0,
                      true,
                      false,
                      0,
                      {a[0], a[1], a[2], a[3]},
                      b,
                      0,
                      host::Element::kE4m3});
}

inline void multiply_held_e4m3(float (&c)[4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  host::StartProduct({c,
                      8,
                      accumulate != 0,
                      true,
                      false,
                      0,
                      {a[0], a[1], a[2], a[3]},
                      b,
                      0,
                      host::Element::kE4m3});
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_E4M3_H_
