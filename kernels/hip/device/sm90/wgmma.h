// Warpgroup matrix products of sm_90a: both operands in shared memory under the 128-byte swizzle
// that tile.h's chunk_at produces, accumulators in the registers of 128 threads. Thread t of the
// group holds rows 16 * (t / 32) + t % 32 / 4 and eight further, columns 8 j + 2 (t % 4) and the
// next: c[4 j + 2 h + e] is row + 8 h, column + e.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_WGMMA_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_WGMMA_H_

#include "kernels/hip/device/primitives/softmax.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip::tile {

// Operand whose depth runs along a row: rows come in groups of eight, 1024 bytes apart.
MLA_DEVICE uint64_t along_rows(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3ffffu) >> 4) | (uint64_t{1} << 16) | (uint64_t{64} << 32) |
         (uint64_t{1} << 62);
}
// Operand whose depth runs down the rows (V): column blocks of 64 elements are `block_bytes` apart.
MLA_DEVICE uint64_t down_rows(uint32_t at, uint32_t block_bytes) {
  return static_cast<uint64_t>((at & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>(block_bytes >> 4) << 16) | (uint64_t{64} << 32) |
         (uint64_t{1} << 62);
}

}  // namespace mla::kernels::hip::tile

#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/sm90_products.h"
#else

namespace mla::kernels::hip::tile {

MLA_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MLA_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Makes ordinary writes to shared memory visible to the matrix unit.
MLA_DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Keeps the compiler from moving accumulator accesses over the asynchronous products.
template <int kCount>
MLA_DEVICE void pin(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Operand lists of the accumulators, from index `i` on.
#define MLA_ACCUMULATORS_4(c, i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#define MLA_ACCUMULATORS_16(c, i)                                                           \
  MLA_ACCUMULATORS_4(c, i), MLA_ACCUMULATORS_4(c, (i) + 4), MLA_ACCUMULATORS_4(c, (i) + 8), \
      MLA_ACCUMULATORS_4(c, (i) + 12)
#define MLA_ACCUMULATORS_32(c) MLA_ACCUMULATORS_16(c, 0), MLA_ACCUMULATORS_16(c, 16)
#define MLA_ACCUMULATORS_128(c)                                                           \
  MLA_ACCUMULATORS_16(c, 0), MLA_ACCUMULATORS_16(c, 16), MLA_ACCUMULATORS_16(c, 32),      \
      MLA_ACCUMULATORS_16(c, 48), MLA_ACCUMULATORS_16(c, 64), MLA_ACCUMULATORS_16(c, 80), \
      MLA_ACCUMULATORS_16(c, 96), MLA_ACCUMULATORS_16(c, 112)
#define MLA_NAMES_32                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MLA_NAMES_128                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
  "%127}, "

// c [64 x 64] (+)= a [64 x 16] b [64 x 16]^T, both along rows.
MLA_DEVICE void wgmma_64x64(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MLA_NAMES_32
      "%32, %33, p, 1, 1, 0, 0;\n}\n"
      : MLA_ACCUMULATORS_32(c)
      : "l"(a), "l"(b), "r"(accumulate));
}

// c [64 x 256] += a [64 x 16] b [16 x 256], a along rows, b down rows.
MLA_DEVICE void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " MLA_NAMES_128
      "%128, %129, p, 1, 1, 0, 1;\n}\n"
      : MLA_ACCUMULATORS_128(c)
      : "l"(a), "l"(b));
}
// As above, with a in registers. Thread t holds, for the rows of its accumulators r and r + 8 and
// for columns k = 2 (t % 4) and k + 8, the pairs a0 = (r, k), a1 = (r + 8, k), a2 = (r, k + 8), a3
// = (r + 8, k + 8).
MLA_DEVICE void wgmma_64x256(float (&c)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " MLA_NAMES_128
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
      : MLA_ACCUMULATORS_128(c)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

#undef MLA_ACCUMULATORS_4
#undef MLA_ACCUMULATORS_16
#undef MLA_ACCUMULATORS_32
#undef MLA_ACCUMULATORS_128
#undef MLA_NAMES_32
#undef MLA_NAMES_128

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

namespace mla::kernels::hip {

// Scores of 64 packed rows and kColumns keys; a lane has scores of two rows.
template <int kColumns>
struct WarpgroupRows {
  static constexpr int kSlots = 2;
  static constexpr int kScoreElems = kColumns / 2;
  struct Scores {
    float c[kScoreElems];
    MLA_DEVICE float at(int i) const { return c[i]; }
    MLA_DEVICE void set(int i, float x) { c[i] = x; }
  };
  using Softmax = OnlineSoftmax<WarpgroupRows, 1>;

  MLA_DEVICE static int row(int warp, int lane, int slot) {
    return warp * 16 + slot * 8 + (lane >> 2);
  }
  MLA_DEVICE static constexpr int score_slot(int i) { return (i >> 1) & 1; }
  MLA_DEVICE static float row_max(float x) { return tile::Wave<16>::row_max(x); }
  MLA_DEVICE static float row_sum(float x) { return tile::Wave<16>::row_sum(x); }

  // Sets scores of keys at or past a row's `limit` to -inf. The scores begin with key `first`.
  MLA_DEVICE static void hide(Scores& s, const int (&limit)[kSlots], int first, int lane) {
    const int first_column = first + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < kScoreElems; ++i) {
      const int position = first_column + 8 * (i >> 2) + (i & 1);
      s.c[i] = position < limit[score_slot(i)] ? s.c[i] : negative_infinity();
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_WGMMA_H_
