// Emulates the instructions of kernels/hip/device/amd/instructions.h on the host. Operands have the
// layouts of the instruction set: see kernels/hip/device/amd/mfma_wave.h, and the tests of
// tests/tile.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_AMD_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_AMD_INSTRUCTIONS_H_

#include <cstring>
#include <limits>

#include "kernels/formats/fp8.h"
#include "kernels/hip/device/target/vendor.h"
#include "kernels/hip/emulator/block/block.h"
#include "kernels/hip/emulator/block/products.h"

namespace mla::kernels::hip::tile {

using lds_t = char*;

template <int kBytes>
lds_t shared_base() {
  return host::the_block->shared.Base(kBytes);
}
inline lds_t flip(lds_t at, int bits) {
  const lds_t base = host::the_block->shared.base();
  return base + ((at - base) ^ bits);
}
// Returns the name of the instruction that moves kBytes bytes a lane.
template <int kBytes>
constexpr const char* read_instruction() {
  return kBytes == 16 ? "ds_read_b128" : kBytes == 8 ? "ds_read_b64" : "ds_read_b32";
}
template <int kBytes>
constexpr const char* write_instruction() {
  return kBytes == 16 ? "ds_write_b128" : kBytes == 8 ? "ds_write_b64" : "ds_write_b32";
}
template <class T>
T shared_load(lds_t address) {
  host::Access(read_instruction<sizeof(T)>(), address);
  host::the_block->shared.Read(address, sizeof(T), host::the_lane->wave->index);
  T x;
  std::memcpy(&x, address, sizeof(T));
  return x;
}
template <class T>
void shared_store(lds_t at, T x) {
  host::Access(write_instruction<sizeof(T)>(), at);
  host::the_block->shared.Write(at, sizeof(T), host::the_lane->wave->index);
  std::memcpy(at, &x, sizeof(T));
}

// --- Atomic additions.
inline void add_word_shared(lds_t address, uint32_t x) {
  host::the_block->shared.Update(address, sizeof(x), host::the_lane->wave->index);
  uint32_t sum;
  std::memcpy(&sum, address, sizeof(sum));
  sum += x;
  std::memcpy(address, &sum, sizeof(sum));
}
inline void add_word(uint32_t* at, uint32_t x) { *at += x; }

inline int opaque(int x) { return x; }
inline u32x4 in_vector_registers(u32x4 x) { return x; }

inline float round_up(float x) { return std::ceil(x); }
inline float reciprocal(float x) { return 1.0f / x; }

// --- 8-bit floats.
template <bool kHigh>
f32x2 floats_of(uint32_t codes) {
  constexpr auto kKind = MLA_GFX942 ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
  const uint32_t pair = kHigh ? codes >> 16 : codes;
  return f32x2{DecodeFp8(static_cast<uint8_t>(pair), kKind),
               DecodeFp8(static_cast<uint8_t>(pair >> 8), kKind)};
}
// The instruction uses only the exponent of the scale, as a power of two.
template <bool kHigh>
uint32_t scaled_bf16_of(uint32_t codes, float scale) {
  const f32x2 x = floats_of<kHigh>(codes);
  const int exponent = static_cast<int>(float_to_bits(scale) >> 23 & 0xffu) - 127;
  return pack_bf16(std::ldexp(x[0], exponent), std::ldexp(x[1], exponent));
}

// The instruction does not saturate numbers beyond the largest code; NaN shows that a kernel relied
// on it.
inline uint32_t code_from(float x) {
  constexpr auto kKind = MLA_GFX942 ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
  return std::abs(x) > Fp8Largest(kKind) ? Fp8NaN(kKind) : EncodeFp8(x, kKind);
}
template <bool kHigh>
uint32_t codes_of(float low, float high, uint32_t others) {
  const uint32_t pair = code_from(low) | code_from(high) << 8;
  return kHigh ? (others & 0xffffu) | pair << 16 : (others & 0xffff0000u) | pair;
}

// --- Between lanes of a wave.
struct Exchange {
  uint64_t x;
  int from;
  uint64_t result;
};

inline uint64_t ballot(bool x) {
  Exchange slot{x ? 1u : 0u, 0, 0};
  host::Meet(
      [](host::Wave& wave) {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= wave.slot<Exchange>(i).x << i;
        for (int i = 0; i < 64; ++i) wave.slot<Exchange>(i).result = bits;
      },
      &slot);
  return slot.result;
}
inline void wave_barrier() { ballot(true); }
inline uint64_t lane_value(uint64_t x, int from) {
  Exchange slot{x, from, 0};
  host::Meet(
      [](host::Wave& wave) {
        for (int i = 0; i < 64; ++i) {
          auto& to = wave.slot<Exchange>(i);
          to.result = wave.slot<Exchange>(to.from & 63).x;
        }
      },
      &slot);
  return slot.result;
}
inline int permute(int at_byte, int x) {
  return static_cast<int>(lane_value(static_cast<uint32_t>(x), at_byte >> 2));
}
inline int read_lane(int x, int lane) {
  return static_cast<int>(lane_value(static_cast<uint32_t>(x), host::Uniform(lane)));
}
inline u32x2 both_halves(uint32_t x) {
  const int lane = thread_index() & 31;
  return u32x2{static_cast<uint32_t>(lane_value(x, lane)),
               static_cast<uint32_t>(lane_value(x, lane + 32))};
}
inline uint32_t permute_bytes(uint32_t high, uint32_t low, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 8) {
    result |= static_cast<uint32_t>(both >> (selector >> i & 7u) * 8 & 0xffu) << i;
  }
  return result;
}

// --- Matrix products. A lane holds consecutive elements along the depth, equally many in all
// lanes. They belong to row lane % kRows (for b: column), and lanes of the same row follow one
// another. A lane also holds sums: runs of four rows, one run every 4 * 64 / kRows rows. Operands
// have `a` and `b`; wide(operand, e) is element e of a lane as a number.
template <int kRows, int kEach, class Operands, class Sums, class WideA, class WideB>
Sums multiply_wave(const Operands& operands, const Sums& c, const WideA&, const WideB&) {
  struct Slot {
    Operands operands;
    Sums c;
  };
  Slot slot{operands, c};
  host::Meet(
      [](host::Wave& wave) {
        constexpr int kGroups = 64 / kRows, kDepth = kGroups * kEach;
        constexpr int kElements = kRows * kRows / 64;
        alignas(32) static thread_local float left[kRows * kDepth], right[kDepth * kRows],
            sums[kRows * kRows];
        const auto row_of = [](int lane, int i) {
          return 4 * kGroups * (i >> 2) + 4 * (lane / kRows) + (i & 3);
        };
        for (int lane = 0; lane < 64; ++lane) {
          const auto& from = wave.slot<Slot>(lane);
          const int row = lane % kRows, first = lane / kRows * kEach;
          for (int e = 0; e < kEach; ++e) {
            left[row * kDepth + first + e] = WideA()(from.operands, e);
            right[(first + e) * kRows + row] = WideB()(from.operands, e);
          }
          for (int i = 0; i < kElements; ++i) sums[row_of(lane, i) * kRows + row] = from.c[i];
        }
        host::MultiplyAdd(sums, left, right, kRows, kRows, kDepth);
        for (int lane = 0; lane < 64; ++lane) {
          auto& to = wave.slot<Slot>(lane);
          for (int i = 0; i < kElements; ++i) {
            to.c[i] = sums[row_of(lane, i) * kRows + lane % kRows];
          }
        }
      },
      &slot);
  return slot.c;
}
// Returns element e of the words of an operand.
template <class Element, class Words>
Element element(const Words& words, int e) {
  Element elements[sizeof(Words) / sizeof(Element)];
  std::memcpy(elements, &words, sizeof(words));
  return elements[e];
}
inline float code_of(uint8_t code) {
  return DecodeFp8(code, MLA_GFX942 ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn);
}

template <class Words>
struct TwoOperands {
  Words a, b;
};
template <int kRows, class Words, class Sums>
Sums multiply_bf16(const Words& a, const Words& b, const Sums& c) {
  using Operands = TwoOperands<Words>;
  return multiply_wave<kRows, sizeof(Words) / 2>(
      Operands{a, b}, c,
      [](const Operands& of, int e) { return host::WideBf16(element<uint16_t>(of.a, e)); },
      [](const Operands& of, int e) { return host::WideBf16(element<uint16_t>(of.b, e)); });
}
inline f32x16 multiply_32x32x16(u32x4 a, u32x4 b, f32x16 c) { return multiply_bf16<32>(a, b, c); }
inline f32x4 multiply_16x16x32(u32x4 a, u32x4 b, f32x4 c) { return multiply_bf16<16>(a, b, c); }
inline f32x16 multiply_32x32x8(u32x2 a, u32x2 b, f32x16 c) { return multiply_bf16<32>(a, b, c); }
inline f32x4 multiply_16x16x16(u32x2 a, u32x2 b, f32x4 c) { return multiply_bf16<16>(a, b, c); }

template <int kRows, class Sums>
Sums multiply_codes(u32x2 a, u32x2 b, const Sums& c) {
  using Operands = TwoOperands<u32x2>;
  return multiply_wave<kRows, 8>(
      Operands{a, b}, c,
      [](const Operands& of, int e) { return code_of(element<uint8_t>(of.a, e)); },
      [](const Operands& of, int e) { return code_of(element<uint8_t>(of.b, e)); });
}
inline f32x16 multiply_codes_32x32x16(u32x2 a, u32x2 b, f32x16 c) {
  return multiply_codes<32>(a, b, c);
}
inline f32x4 multiply_codes_16x16x32(u32x2 a, u32x2 b, f32x4 c) {
  return multiply_codes<16>(a, b, c);
}
inline f32x16 multiply_codes_32x32x64(const u32x8& a, int a_exponent, const u32x8& b,
                                      int b_exponent, const f32x16& c) {
  struct Operands {
    u32x8 a;
    int a_exponent;
    u32x8 b;
    int b_exponent;
  };
  // The low eight bits are a scale of E8M0, whose 255 is NaN.
  static constexpr auto scaled = [](float code, int exponent) {
    const int bits = exponent & 255;
    return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(code, bits - 127);
  };
  return multiply_wave<32, 32>(
      Operands{a, a_exponent, b, b_exponent}, c,
      [](const Operands& of, int e) {
        return scaled(code_of(element<uint8_t>(of.a, e)), of.a_exponent);
      },
      [](const Operands& of, int e) {
        return scaled(code_of(element<uint8_t>(of.b, e)), of.b_exponent);
      });
}

// A group of 16 lanes reads kRows rows of 16 columns. kLanes lanes give the addresses of a row's
// parts, kRows columns each, and every lane receives one column.
template <typename Element>
u32x2 ReadTransposed(const char* instruction, lds_t address) {
  static constexpr int kRows = 8 / sizeof(Element), kLanes = 16 / kRows;
  struct Slot {
    Element block[kRows];
    Element column[kRows];
  } slot;
  host::Access(instruction, address);
  host::the_block->shared.Read(address, sizeof(slot.block), host::the_lane->wave->index);
  std::memcpy(slot.block, address, sizeof(slot.block));
  host::Meet(
      [](host::Wave& wave) {
        for (int lane = 0; lane < 64; ++lane) {
          const int group = lane & ~15, column = lane & 15;
          for (int row = 0; row < kRows; ++row) {
            wave.slot<Slot>(lane).column[row] =
                wave.slot<Slot>(group + row * kLanes + column / kRows).block[column % kRows];
          }
        }
      },
      &slot);
  u32x2 result;
  std::memcpy(&result, slot.column, sizeof(result));
  return result;
}
inline u32x2 read_transposed(lds_t at) {
  return ReadTransposed<uint16_t>("ds_read_b64_tr_b16", at);
}
inline u32x2 read_transposed_bytes(lds_t at) {
  return ReadTransposed<uint8_t>("ds_read_b64_tr_b8", at);
}

// --- Asynchronous copies.
template <int kBytes>
void start_copy(lds_t wave_base, int offset, const void* source) {
  host::Lane& lane = *host::the_lane;
  host::Uniform(static_cast<int>(wave_base - host::the_block->shared.base()));
  host::Access(kBytes == 16 ? "global_load_lds_dwordx4" : "global_load_lds_dword",
               wave_base + offset + lane.number * kBytes);
  host::the_block->shared.StartCopy(lane.copies, wave_base + offset + lane.number * kBytes, source,
                                    kBytes, lane.wave->index);
}
template <int kOffset>
void copy_4_words(lds_t wave_base, const void* source) {
  start_copy<16>(wave_base, kOffset, source);
}
template <int kOffset>
void copy_word(lds_t wave_base, const void* source) {
  start_copy<4>(wave_base, kOffset, source);
}
// The instruction counts copies of the wave, so the copies of all its lanes land.
inline void land_all_but(int younger) {
  host::Meet(
      [](host::Wave& wave) {
        for (int i = 0; i < 64; ++i) {
          host::the_block->shared.LandAllBut(wave.lane[static_cast<size_t>(i)]->copies,
                                             wave.slot<int>(i), wave.index);
        }
      },
      &younger);
}
template <int kYounger>
void wait_for_copies() {
  static_assert(kYounger < 64, "vmcnt has six bits");
  land_all_but(kYounger);
}

}  // namespace mla::kernels::hip::tile

namespace mla::kernels::hip {

inline void wait_for_loads() { tile::land_all_but(0); }

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_AMD_INSTRUCTIONS_H_
