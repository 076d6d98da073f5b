// Wraps the instructions of gfx942 and gfx950 of which tile primitives are made, one function each.
// On the host kernels/hip/emulator/instructions/amd_instructions.h supplies the same functions.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_INSTRUCTIONS_H_

#include "kernels/hip/device/target/vendor.h"

namespace mla::kernels::hip::tile {

MLA_VECTOR(short, 4, bf16x4);
MLA_VECTOR(uint32_t, 2, u32x2);
MLA_VECTOR(uint32_t, 4, u32x4);
MLA_VECTOR(uint32_t, 8, u32x8);
MLA_VECTOR(float, 2, f32x2);
MLA_VECTOR(float, 4, f32x4);
MLA_VECTOR(float, 16, f32x16);

}  // namespace mla::kernels::hip::tile

#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/amd_instructions.h"
#else

namespace mla::kernels::hip::tile {

using lds_t = MLA_LDS char*;
MLA_VECTOR(__bf16, 8, bf16x8);

template <int kBytes>
MLA_DEVICE lds_t shared_base() {
  static __shared__ __attribute__((aligned(128))) char memory[kBytes];
  return (lds_t)memory;
}
// Returns an address with some bits of the offset inverted.
MLA_DEVICE lds_t flip(lds_t at, int bits) {
  return (lds_t)(uintptr_t)((uint32_t)(uintptr_t)at ^ static_cast<uint32_t>(bits));
}
template <class T>
MLA_DEVICE T shared_load(lds_t at) {
  return *(MLA_LDS T*)at;
}
template <class T>
MLA_DEVICE void shared_store(lds_t at, T x) {
  *(MLA_LDS T*)at = x;
}

// Hides a number's origin from the compiler. Values derived from it are computed again at each use,
// not kept in registers for a whole loop, because registers are scarce.
MLA_DEVICE int opaque(int x) {
  asm volatile("" : "+v"(x));
  return x;
}

// Keeps an operand of products out of the accumulation registers. The compiler would move
// accumulators to make room for it there.
MLA_DEVICE u32x4 in_vector_registers(u32x4 x) {
  asm("" : "+v"(x));
  return x;
}

MLA_DEVICE float round_up(float x) { return __builtin_ceilf(x); }
MLA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

// --- Two 8-bit floats of the pool's kind, in the low or the high half of a word.
template <bool kHigh>
MLA_DEVICE f32x2 floats_of(uint32_t codes) {
  return __builtin_bit_cast(f32x2, __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), kHigh));
}
// Rounds two numbers to codes and stores them in that half of `others`; the other half stays.
template <bool kHigh>
MLA_DEVICE uint32_t codes_of(float low, float high, uint32_t others) {
  return static_cast<uint32_t>(
      __builtin_amdgcn_cvt_pk_fp8_f32(low, high, static_cast<int>(others), kHigh));
}
#if MLA_GFX950
// Returns the two as packed bf16, times the power of two in the exponent of `scale`.
template <bool kHigh>
MLA_DEVICE uint32_t scaled_bf16_of(uint32_t codes, float scale) {
  return __builtin_bit_cast(uint32_t,
                            __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(codes, scale, kHigh));
}
#endif

// --- Atomic additions.
MLA_DEVICE void add_word_shared(lds_t at, uint32_t x) {
  __hip_atomic_fetch_add((MLA_LDS uint32_t*)at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
MLA_DEVICE void add_word(uint32_t* at, uint32_t x) {
  __hip_atomic_fetch_add(as_global<uint32_t>(at), x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// --- Between lanes of a wave.
MLA_DEVICE uint64_t ballot(bool x) { return __builtin_amdgcn_ballot_w64(x); }
// Makes earlier LDS writes of the wave's lanes visible to all lanes of the wave.
MLA_DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
// Returns x of lane at_byte / 4.
MLA_DEVICE int permute(int at_byte, int x) { return __builtin_amdgcn_ds_bpermute(at_byte, x); }
MLA_DEVICE int read_lane(int x, int lane) { return __builtin_amdgcn_readlane(x, lane); }
#if MLA_GFX950
// Returns x of the lower half of the wave, then of the upper half, in every lane.
MLA_DEVICE u32x2 both_halves(uint32_t x) {
  const auto swapped = __builtin_amdgcn_permlane32_swap(x, x, false, false);
  return u32x2{swapped[0], swapped[1]};
}
#endif
// Each byte of `selector` names a byte: 0 to 3 of `low`, 4 to 7 of `high`.
MLA_DEVICE uint32_t permute_bytes(uint32_t high, uint32_t low, uint32_t selector) {
  return __builtin_amdgcn_perm(high, low, selector);
}

// --- Matrix products c + a b.
#if MLA_GFX950
MLA_DEVICE f32x16 multiply_32x32x16(u32x4 a, u32x4 b, f32x16 c) {
  const bf16x8 x = __builtin_bit_cast(bf16x8, a), y = __builtin_bit_cast(bf16x8, b);
  return __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, c, 0, 0, 0);
}
MLA_DEVICE f32x4 multiply_16x16x32(u32x4 a, u32x4 b, f32x4 c) {
  const bf16x8 x = __builtin_bit_cast(bf16x8, a), y = __builtin_bit_cast(bf16x8, b);
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, c, 0, 0, 0);
}
// Returns c plus the product of 8-bit floats a b, each operand times 2^(its exponent - 127). A lane
// holds 32 values along the depth of its row of a, or its column of b, and their common exponent.
MLA_DEVICE f32x16 multiply_codes_32x32x64(u32x8 a, int a_exponent, u32x8 b, int b_exponent,
                                          f32x16 c) {
  constexpr int kE4m3 = 0;
  typedef int Words __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(__builtin_bit_cast(Words, a),
                                                         __builtin_bit_cast(Words, b), c, kE4m3,
                                                         kE4m3, 0, a_exponent, 0, b_exponent);
}
#else
MLA_DEVICE f32x16 multiply_32x32x8(u32x2 a, u32x2 b, f32x16 c) {
  const bf16x4 x = __builtin_bit_cast(bf16x4, a), y = __builtin_bit_cast(bf16x4, b);
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, c, 0, 0, 0);
}
MLA_DEVICE f32x4 multiply_16x16x16(u32x2 a, u32x2 b, f32x4 c) {
  const bf16x4 x = __builtin_bit_cast(bf16x4, a), y = __builtin_bit_cast(bf16x4, b);
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c, 0, 0, 0);
}
// Returns the products of 8-bit floats; a lane has eight bytes of the depth of its row, or column.
MLA_DEVICE f32x16 multiply_codes_32x32x16(u32x2 a, u32x2 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(__builtin_bit_cast(long, a),
                                                    __builtin_bit_cast(long, b), c, 0, 0, 0);
}
MLA_DEVICE f32x4 multiply_codes_16x16x32(u32x2 a, u32x2 b, f32x4 c) {
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, a),
                                                    __builtin_bit_cast(long, b), c, 0, 0, 0);
}
#endif

#if MLA_GFX950
// A group of 16 lanes reads a block of 4 rows x 16 columns and gets it transposed: lane i supplies
// the address of row i / 4, columns 4 * (i % 4), and receives column i.
MLA_DEVICE u32x2 read_transposed(lds_t at) {
  return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((MLA_LDS bf16x4*)at));
}

// As read_transposed, for bytes: 8 rows x 16 columns, lane i supplies the address of row i / 2,
// columns 8 * (i % 2).
MLA_DEVICE u32x2 read_transposed_bytes(lds_t at) {
  typedef int Words __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr8_b64_v2i32((MLA_LDS Words*)at));
}

// --- Asynchronous copies to LDS: lane i's words go to wave_base + kOffset + i times their size.
// The instruction is written as assembly because the compiler cannot tell one stage of the LDS from
// another, and would wait for all copies before each read. It sets m0, which cannot be declared as
// clobbered, because the compiler reserves it. report.py fails if the compiler itself uses m0 in a
// kernel.
template <int kOffset>
MLA_DEVICE void copy_4_words(lds_t wave_base, const void* source) {
  const int base = uniform(static_cast<int>((uint32_t)(uintptr_t)wave_base));
  asm volatile("s_add_u32 m0, %0, %2\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, off" ::"s"(base),
               "v"(source), "n"(kOffset)
               : "memory", "scc");
}
template <int kOffset>
MLA_DEVICE void copy_word(lds_t wave_base, const void* source) {
  const int base = uniform(static_cast<int>((uint32_t)(uintptr_t)wave_base));
  asm volatile("s_add_u32 m0, %0, %2\n\ts_nop 0\n\tglobal_load_lds_dword %1, off" ::"s"(base),
               "v"(source), "n"(kOffset)
               : "memory", "scc");
}
// vmcnt counts down in order: all copies except the kYounger issued last have landed. Loads of the
// compiler in between only lengthen the wait.
template <int kYounger>
MLA_DEVICE void wait_for_copies() {
  static_assert(kYounger < 64, "vmcnt has six bits");
  asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kYounger) : "memory");
}
#endif

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_INSTRUCTIONS_H_
