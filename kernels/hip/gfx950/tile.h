// Tile primitives on gfx950: v_mfma 32x32x16 / 16x16x32 bf16, global_load_lds of 16 bytes a lane,
// ds_read_b64_tr_b16. Layouts: kernels/hip/common/mfma_wave.h.
#ifndef MLA_KERNELS_HIP_GFX950_TILE_H_
#define MLA_KERNELS_HIP_GFX950_TILE_H_

#include "kernels/hip/common/mfma_wave.h"

namespace mla::gpu::tile {

// Asynchronous copies of 16 bytes a lane to consecutive chunks from `wave_base` on. The instruction
// is written as assembly because the compiler, which can not tell one stage of the LDS from
// another, would otherwise wait for all copies before each read. It sets m0, which can not be
// declared: the compiler reserves it. report.py fails when the compiler itself uses m0 in a kernel.
struct Copies {
  static constexpr bool kThroughRegisters = false;
  static constexpr bool kLookUpInLds = true;
  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t wave_base, int, const void* source) {
    const int base = uniform(static_cast<int>((uint32_t)(uintptr_t)wave_base));
    asm volatile("s_add_u32 m0, %0, %2\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, off" ::"s"(base),
                 "v"(source), "n"(kOffset)
                 : "memory", "scc");
  }
  // Four bytes a lane.
  template <int kOffset>
  MLA_DEVICE void issue_word(lds_t wave_base, const void* source) {
    const int base = uniform(static_cast<int>((uint32_t)(uintptr_t)wave_base));
    asm volatile("s_add_u32 m0, %0, %2\n\ts_nop 0\n\tglobal_load_lds_dword %1, off" ::"s"(base),
                 "v"(source), "n"(kOffset)
                 : "memory", "scc");
  }
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t, int) {}
  MLA_DEVICE void close_stage() {}
  // vmcnt counts down in order: with kYounger stages of kPerStage copies issued later, everything
  // older has landed. Loads of the compiler in between only make this wait longer.
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {
    static_assert(kYounger * kPerStage < 64, "vmcnt has six bits");
    asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kYounger * kPerStage) : "memory");
  }
};

template <int kRows_>
struct Wave : WaveBase<kRows_> {
  using Base = WaveBase<kRows_>;
  using Base::kPvDepth;
  using Base::kRows;
  using typename Base::K;
  using typename Base::P;
  using typename Base::Q;
  using typename Base::Scores;
  static constexpr int kOutCols = kRows;
  static constexpr int kOutElems = Base::kScoreElems;
  static constexpr int kRun = 4;

  struct V {
    u32x2 a, b;
  };
  struct Out {
    typename Base::Acc c;
    MLA_DEVICE float at(int i) const { return c[i]; }
    MLA_DEVICE void set(int i, float x) { c[i] = x; }
  };
  MLA_DEVICE static void clear(Out& o) { o.c = typename Base::Acc{}; }
  MLA_DEVICE static void scale(Out& o, const float (&factor)[1]) { o.c *= factor[0]; }
  MLA_DEVICE static int out_col(int lane, int fragment, int i) {
    return fragment * kOutCols + Base::acc_row(lane, i);
  }
  MLA_DEVICE static typename Base::Acc multiply(u32x4 a, u32x4 b, typename Base::Acc c) {
    const bf16x8 x = __builtin_bit_cast(bf16x8, a), y = __builtin_bit_cast(bf16x8, b);
    if constexpr (kRows == 32) {
      return __builtin_amdgcn_mfma_f32_32x32x16_bf16(x, y, c, 0, 0, 0);
    } else {
      return __builtin_amdgcn_mfma_f32_16x16x32_bf16(x, y, c, 0, 0, 0);
    }
  }
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k) {
    s.c = multiply(k.r, q.r, s.c);
  }
  // A group of 16 lanes reads a block of 4 depth rows x 16 columns and gets it transposed: lane i
  // supplies the address of row i / 4, columns 4 * (i % 4), and receives column i.
  template <int kTileRows>
  MLA_DEVICE static void load_v(V& v, lds_t tile, int step, int fragment, int lane) {
    const int i = lane & 15;
    const int col = fragment * kOutCols + (kRows == 32 ? (lane & 16) : 0) + (i & 3) * 4;
    const int first = step * kPvDepth + 4 * Base::group(lane) + (i >> 2);
    v.a = read_transposed(chunk_at<kTileRows>(tile, first, col >> 3) + (col & 4) * 2);
    v.b =
        read_transposed(chunk_at<kTileRows>(tile, first + kPvDepth / 2, col >> 3) + (col & 4) * 2);
  }
  MLA_DEVICE static u32x2 read_transposed(lds_t at) {
    return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((MLA_LDS bf16x4*)at));
  }
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v) {
    o.c = multiply(u32x4{v.a[0], v.a[1], v.b[0], v.b[1]}, p.r, o.c);
  }
};

}  // namespace mla::gpu::tile

#endif  // MLA_KERNELS_HIP_GFX950_TILE_H_
