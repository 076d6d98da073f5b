// Defines the tile primitives of gfx950: v_mfma 32x32x16 / 16x16x32 bf16, global_load_lds of 16
// bytes a lane, ds_read_b64_tr_b16. Layouts: kernels/hip/device/amd/mfma_wave.h.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX950_TILE_H_
#define MLA_KERNELS_HIP_DEVICE_GFX950_TILE_H_

#include "kernels/hip/device/amd/mfma_wave.h"

namespace mla::kernels::hip::tile {

// Copies asynchronously 16 bytes a lane, to consecutive chunks from `wave_base` on.
struct Copies {
  static constexpr bool kThroughRegisters = false;
  static constexpr bool kLookUpInLds = true;
  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t wave_base, int, const void* source) {
    copy_4_words<kOffset>(wave_base, source);
  }
  // Copies four bytes a lane.
  template <int kOffset>
  MLA_DEVICE void issue_word(lds_t wave_base, int, const void* source) {
    copy_word<kOffset>(wave_base, source);
  }
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t, int) {}
  MLA_DEVICE void close_stage() {}
  // Waits until at most kYounger stages of kPerStage copies are in flight; all older copies have
  // landed.
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {
    wait_for_copies<kYounger * kPerStage>();
  }
};
using WeightCopies = Copies;  // for row products

// Widens two codes to bf16. `scale` is a power of two; 1 unless kScaled.
template <bool kHigh, bool kScaled>
MLA_DEVICE uint32_t bf16_of(uint32_t codes, float scale) {
  return scaled_bf16_of<kHigh>(codes, scale);
}

template <bool kHigh>
MLA_DEVICE uint32_t plain_bf16_of(uint32_t codes) {
  return bf16_of<kHigh, false>(codes, 1.0f);
}

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
    if constexpr (kRows == 32) {
      return multiply_32x32x16(a, b, c);
    } else {
      return multiply_16x16x32(a, b, c);
    }
  }
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k) {
    s.c = multiply(k.r, q.r, s.c);
  }
  // Each group of 16 lanes reads 4 depth rows x 16 columns (read_transposed). As in KeyRows,
  // addresses are precomputed: for the two fragments of a column block, and between steps, they
  // differ in bits of the chunk.
  template <int kTileRows, Order kOrder = Order::kOfScores>
  struct ValueRows {
    static constexpr bool kAlong = kOrder == Order::kAlongDepth;
    lds_t address;
    MLA_DEVICE ValueRows(lds_t tile, int lane) {
      const int i = lane & 15;
      const int col = (kRows == 32 ? (lane & 16) : 0) + (i & 3) * 4;
      const int row = (kAlong ? 8 : 4) * Base::group(lane) + (i >> 2);
      address = chunk_at<kTileRows>(tile, row, col >> 3) + (col & 4) * 2;
    }
    MLA_DEVICE lds_t place(int row, int col) const {
      return flip(address, ((col >> 3 & 7) ^ swizzle(row)) * 16) + (col >> 6) * (kTileRows * 128) +
             row * 128;
    }
    MLA_DEVICE void load(V& v, int step, int fragment) const {
      v.a = read_transposed(place(step * kPvDepth, fragment * kOutCols));
      v.b = read_transposed(
          place(step * kPvDepth + (kAlong ? 4 : kPvDepth / 2), fragment * kOutCols));
    }
  };
  // Does what ValueRows does, for codes: each group of 16 lanes reads 8 depth rows x 16 columns. In
  // waves of 32 rows the eight rows are consecutive, so that no two lanes share a bank; scores have
  // that order because keys are read in it (kRun). In waves of 16 rows they have the order of the
  // scores, four and four.
  template <int kTileRows>
  struct ValueCodes {
    static constexpr int kRun = kRows == 32 ? 8 : 4;
    struct Raw {
      u32x2 r;
    };
    lds_t address;
    MLA_DEVICE ValueCodes(lds_t tile, int lane) {
      const int i = lane & 15, eighth = i >> 1;
      const int row = kRun == 8
                          ? 8 * Base::group(lane) + eighth
                          : 4 * Base::group(lane) + (eighth & 3) + (eighth >> 2) * (kPvDepth / 2);
      address = chunk_at<kTileRows>(tile, row, kRows == 32 ? lane >> 4 & 1 : 0) + (i & 1) * 8;
    }
    MLA_DEVICE void load(Raw& raw, int step, int fragment) const {
      const int row = step * kPvDepth, chunk = fragment * (kOutCols / 16);
      raw.r = read_transposed_bytes(flip(address, ((chunk & 7) ^ swizzle(row)) * 16) +
                                    (chunk >> 3) * (kTileRows * 128) + row * 128);
    }
    MLA_DEVICE static void widen(V& v, const Raw& raw) {
      v.a = u32x2{bf16_of<false, false>(raw.r[0], 1.0f), bf16_of<true, false>(raw.r[0], 1.0f)};
      v.b = u32x2{bf16_of<false, false>(raw.r[1], 1.0f), bf16_of<true, false>(raw.r[1], 1.0f)};
    }
  };
  template <int kTileRows>
  MLA_DEVICE static void load_v(V& v, lds_t tile, int step, int fragment, int lane) {
    ValueRows<kTileRows>(tile, lane).load(v, step, fragment);
  }
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v) {
    o.c = multiply(in_vector_registers(u32x4{v.a[0], v.a[1], v.b[0], v.b[1]}), p.r, o.c);
  }
  // As the product of outputs, transposed: a lane has packed rows acc_row(lane, i) of its column.
  MLA_DEVICE static void turned_outputs(Out& o, const P& p, const V& v) {
    o.c = multiply(p.r, in_vector_registers(u32x4{v.a[0], v.a[1], v.b[0], v.b[1]}), o.c);
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_GFX950_TILE_H_
