// This header has instructions of sm_90a that widen e4m3 codes to binary16, and products of
// binary16 and bf16 whose first operand is in registers. e4m3_instructions.h has the products of
// e4m3. On the host kernels/hip/emulator/instructions/sm90_fp8.h supplies the same functions.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_FP8_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_FP8_INSTRUCTIONS_H_

#include "kernels/hip/device/sm90/wgmma.h"

#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/sm90_fp8.h"
#else

namespace mla::kernels::hip::tile {

MLA_DEVICE uint32_t multiply_f16_pairs(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Widens two of four codes to binary16: the lower two for kPair 0, else the upper two. The result
// is exact; NaN stays NaN.
template <int kPair>
MLA_DEVICE uint32_t fp8_to_f16(uint32_t codes) {
  uint32_t out;
  if constexpr (kPair == 0) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}\n"
        : "=r"(out)
        : "r"(codes));
  } else {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}\n"
        : "=r"(out)
        : "r"(codes));
  }
  return out;
}
// `low` lands in the low half.
MLA_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
MLA_DEVICE void f16_to_floats(uint32_t pair, float& low, float& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}
// Returns the bytes 0, 2, 1, 3 of a word, in this order.
MLA_DEVICE uint32_t exchange_middle_bytes(uint32_t x) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %1, 0x3120;" : "=r"(out) : "r"(x));
  return out;
}
// Loads two floats; `at` is a multiple of 8 bytes.
MLA_DEVICE void load_two_floats(float (&x)[2], uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at) : "memory");
}
MLA_DEVICE uint32_t load_word_shared(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
// Does the inverse of load_matrices_transposed.
MLA_DEVICE void store_matrices_transposed(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2,
                                          uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

#define MLA_HELD_4(c, i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#define MLA_HELD_8(c, i) MLA_HELD_4(c, i), MLA_HELD_4(c, (i) + 4)

// Sets c [64 x 16] to a [64 x 16] b [16 x 16]^T, and adds the old c if `accumulate` is not 0. `b`
// is a descriptor from along_rows. The product is asynchronous: the caller brackets it with
// wgmma_begin, wgmma_commit and wgmma_wait. Thread t holds, for the rows r and r + 8 of its
// accumulators and for columns k = 2 (t % 4) and k + 8, the pairs a[0] = (r, k), a[1] = (r + 8, k),
// a[2] = (r, k + 8), a[3] = (r + 8, k + 8).
#define MLA_HELD_16_COLUMNS(name, type)                                                   \
  MLA_DEVICE void name(float(&c)[8], const uint32_t(&a)[4], uint64_t b, int accumulate) { \
    asm volatile(                                                                         \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." type                                \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"    \
        : MLA_HELD_8(c, 0)                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
  }
MLA_HELD_16_COLUMNS(multiply_held_f16, "f16.f16")
MLA_HELD_16_COLUMNS(multiply_held_bf16, "bf16.bf16")
#undef MLA_HELD_16_COLUMNS
// Does the same with 64 columns.
MLA_DEVICE void multiply_held_f16(float (&c)[32], const uint32_t (&a)[4], uint64_t b,
                                  int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : MLA_HELD_8(c, 0), MLA_HELD_8(c, 8), MLA_HELD_8(c, 16), MLA_HELD_8(c, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#undef MLA_HELD_4
#undef MLA_HELD_8

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

namespace mla::kernels::hip {

// Returns eight codes times their scale, rounded to bf16.
MLA_DEVICE Chunk fp8_chunk(const uint32_t (&codes)[2], float scale) {
  Chunk c;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[4];
    tile::f16_to_floats(tile::fp8_to_f16<0>(codes[i]), x[0], x[1]);
    tile::f16_to_floats(tile::fp8_to_f16<1>(codes[i]), x[2], x[3]);
    c.w[2 * i] = pack_bf16(x[0] * scale, x[1] * scale);
    c.w[2 * i + 1] = pack_bf16(x[2] * scale, x[3] * scale);
  }
  return c;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_FP8_INSTRUCTIONS_H_
