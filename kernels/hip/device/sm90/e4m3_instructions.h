// This header has the instructions of sm_90a that convert to e4m3 and multiply it. On the host
// kernels/hip/emulator/instructions/sm90_e4m3.h supplies the same functions.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_E4M3_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_E4M3_INSTRUCTIONS_H_

#include "kernels/hip/device/sm90/fp8_instructions.h"
#include "kernels/hip/device/sm90/wgmma.h"

namespace mla::kernels::hip::tile {

// Returns the descriptor of an operand whose depth runs along rows of 64 bytes. Rows come in groups
// of eight, 512 bytes apart, and chunk c of row r lies at position c ^ (r / 2 % 4).
MLA_DEVICE uint64_t along_narrow_rows(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3ffffu) >> 4) | (uint64_t{1} << 16) | (uint64_t{32} << 32) |
         (uint64_t{2} << 62);
}

}  // namespace mla::kernels::hip::tile

#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/sm90_e4m3.h"
#else

namespace mla::kernels::hip::tile {

// Returns four numbers as codes, the first in the lowest byte. Magnitudes above 448 become 448; NaN
// stays NaN.
MLA_DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t out;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\nmov.b32 %0, {l, h};\n}\n"
      : "=r"(out)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return out;
}
MLA_DEVICE uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Compares the binary16 halves of a with the halves of b and returns the lesser of each. If one is
// NaN, it returns the other.
MLA_DEVICE uint32_t less_of_f16_pairs(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Returns 1 / x, within two units in the last place; exact for powers of two. A subnormal x counts
// as zero.
MLA_DEVICE float reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
// Selects four bytes: digit i of kSelector names byte i of the result; 0 to 3 are a's, 4 to 7 b's.
template <uint32_t kSelector>
MLA_DEVICE uint32_t choose_bytes(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "n"(kSelector));
  return out;
}

#define MLA_E4M3_4(c, i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#define MLA_E4M3_16(c, i) \
  MLA_E4M3_4(c, i), MLA_E4M3_4(c, (i) + 4), MLA_E4M3_4(c, (i) + 8), MLA_E4M3_4(c, (i) + 12)
#define MLA_E4M3_NAMES_32                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MLA_E4M3_NAMES_64                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// c [64 x 64] (+)= a [64 x 32] b [64 x 32]^T of e4m3, both along rows.
MLA_DEVICE void multiply_e4m3(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " MLA_E4M3_NAMES_32
      "%32, %33, p, 1, 1;\n}\n"
      : MLA_E4M3_16(c, 0), MLA_E4M3_16(c, 16)
      : "l"(a), "l"(b), "r"(accumulate));
}
// c [64 x 128] (+)= a [64 x 32] b [128 x 32]^T of e4m3, both along rows.
MLA_DEVICE void multiply_e4m3(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " MLA_E4M3_NAMES_64
      "%64, %65, p, 1, 1;\n}\n"
      : MLA_E4M3_16(c, 0), MLA_E4M3_16(c, 16), MLA_E4M3_16(c, 32), MLA_E4M3_16(c, 48)
      : "l"(a), "l"(b), "r"(accumulate));
}
// c [64 x 64] (+)= a [64 x 32] b [64 x 32]^T, a in registers. Let r and r + 8 be the rows of thread
// t's accumulators, and k = 4 (t % 4). The thread holds a[0] = row r, columns k to k + 3; a[1] =
// row r + 8, the same columns; a[2] and a[3] = the same rows, columns k + 16 to k + 19.
MLA_DEVICE void multiply_held_e4m3(float (&c)[32], const uint32_t (&a)[4], uint64_t b,
                                   int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " MLA_E4M3_NAMES_32
      "{%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : MLA_E4M3_16(c, 0), MLA_E4M3_16(c, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// c [64 x 8] (+)= a [64 x 32] b [8 x 32]^T, a in registers.
MLA_DEVICE void multiply_held_e4m3(float (&c)[4], const uint32_t (&a)[4], uint64_t b,
                                   int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "%8, p, 1, 1;\n}\n"
      : MLA_E4M3_4(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef MLA_E4M3_4
#undef MLA_E4M3_16
#undef MLA_E4M3_NAMES_32
#undef MLA_E4M3_NAMES_64

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_E4M3_INSTRUCTIONS_H_
