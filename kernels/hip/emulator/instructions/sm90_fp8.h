// Emulates the instructions of kernels/hip/device/sm90/fp8_instructions.h on the host.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_FP8_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_FP8_H_

#include <bit>

#include "kernels/formats/fp8.h"
#include "kernels/hip/emulator/block/warpgroup.h"
#include "kernels/hip/emulator/instructions/sm90_instructions.h"

namespace mla::kernels::hip::tile {

inline float f16_to_float(uint32_t low_half) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(low_half)));
}
inline uint32_t float_to_f16(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline uint32_t pack_f16(float low, float high) {
  return float_to_f16(low) | float_to_f16(high) << 16;
}
inline void f16_to_floats(uint32_t pair, float& low, float& high) {
  low = f16_to_float(pair);
  high = f16_to_float(pair >> 16);
}
inline uint32_t multiply_f16_pairs(uint32_t a, uint32_t b) {
  return pack_f16(f16_to_float(a) * f16_to_float(b), f16_to_float(a >> 16) * f16_to_float(b >> 16));
}
template <int kPair>
uint32_t fp8_to_f16(uint32_t codes) {
  const auto number = [&](int byte) {
    return DecodeFp8(static_cast<uint8_t>(codes >> 8 * byte), Fp8Kind::kE4m3Fn);
  };
  return pack_f16(number(2 * kPair), number(2 * kPair + 1));
}
inline uint32_t exchange_middle_bytes(uint32_t x) {
  return (x & 0xff0000ffu) | (x & 0xff00u) << 8 | (x >> 8 & 0xff00u);
}

inline void load_two_floats(float (&x)[2], lds_t address) {
  struct alignas(8) Two {
    float x[2];
  };
  const Two two = shared_load<Two>(address);
  x[0] = two.x[0];
  x[1] = two.x[1];
}
inline uint32_t load_word_shared(lds_t at) { return shared_load<uint32_t>(at); }
inline void store_matrices_transposed(lds_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                      uint32_t r3) {
  Matrices slot{{}, {r0, r1, r2, r3}};
  host::Meet(
      [](host::Wave& wave) {
        for (int lane = 0; lane < 32; ++lane) {
          const int row = lane % 8, matrix = lane / 8;
          for (int col = 0; col < 8; ++col) {
            const uint32_t word = wave.slot<Matrices>(col * 4 + row / 2).word[matrix];
            wave.slot<Matrices>(lane).row[col] = static_cast<uint16_t>(word >> row % 2 * 16);
          }
        }
      },
      &slot);
  Chunk c;
  std::memcpy(c.w, slot.row, sizeof(c.w));
  store_chunk(address, c);
}

template <int kElements>
void multiply_held_f16(float (&c)[kElements], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  host::StartProduct({c,
                      2 * kElements,
                      accumulate != 0,
                      true,
                      false,
                      0,
                      {a[0], a[1], a[2], a[3]},
                      b,
                      0,
                      host::Element::kBinary16});
}
inline void multiply_held_bf16(float (&c)[8], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  host::StartProduct({c, 16, accumulate != 0, true, false, 0, {a[0], a[1], a[2], a[3]}, b, 0});
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_FP8_H_
