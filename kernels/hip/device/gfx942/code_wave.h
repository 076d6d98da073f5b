// Multiplies 8-bit floats on gfx942: v_mfma 32x32x16 / 16x16x32 fp8, twice the rate of bf16. They
// accumulate in fp32 and take no powers of two.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX942_CODE_WAVE_H_
#define MLA_KERNELS_HIP_DEVICE_GFX942_CODE_WAVE_H_

#include "kernels/hip/device/gfx942/tile.h"

namespace mla::kernels::hip::tile {

// Does what Wave does, with operands of codes. In a step of scores, which is two products, a lane
// has 16 codes of a row's depth; a step of outputs is one product.
template <int kRows_>
struct CodeWave : Wave<kRows_> {
  using Base = Wave<kRows_>;
  using Base::clear;
  using Base::kGroups;
  using Base::scale;
  using typename Base::Acc;
  using typename Base::K;
  using typename Base::Out;
  using typename Base::Q;
  using typename Base::Scores;
  static constexpr bool kTakesPowers = false;
  static constexpr int kLaneCodes = 16;
  static constexpr int kDepth = kLaneCodes * kGroups;

  struct P {
    u32x2 r;
  };
  struct V {
    u32x2 operand[4];  // [column mod 4]
  };
  // Sums of the rounded probabilities of a row. For 16 rows they are a product with ones, each of
  // whose elements is the row's sum. For 32 rows registers do not suffice for such a product, so
  // each lane sums its own probabilities.
  static constexpr bool kSumsByProducts = kRows_ == 16;
  struct Sums {
    std::conditional_t<kSumsByProducts, Acc, float> c;
  };
  MLA_DEVICE static void clear(Sums& s) { s = Sums{}; }
  MLA_DEVICE static void scale(Sums& s, const float (&factor)[1]) { s.c *= factor[0]; }
  MLA_DEVICE static void add_up(Sums& s, const P& p) {
    if constexpr (kSumsByProducts) {
      constexpr uint32_t kOnes = 0x40404040u;
      s.c = multiply(u32x2{kOnes, kOnes}, p.r, s.c);
    } else {
      f32x2 of_pairs = floats_of<false>(p.r[0]) + floats_of<true>(p.r[0]);
      of_pairs += floats_of<false>(p.r[1]) + floats_of<true>(p.r[1]);
      s.c += of_pairs[0] + of_pairs[1];
    }
  }
  // Returns the row's sum, in all lanes that share it.
  MLA_DEVICE static float total(const Sums& s) {
    if constexpr (kSumsByProducts) {
      return s.c[0];
    } else {
      return Base::row_sum(s.c);
    }
  }

  MLA_DEVICE static Acc multiply(u32x2 a, u32x2 b, Acc c) {
    if constexpr (kRows_ == 32) {
      return multiply_codes_32x32x16(a, b, c);
    } else {
      return multiply_codes_16x16x32(a, b, c);
    }
  }
  // Rounds four numbers to a word of codes.
  MLA_DEVICE static uint32_t codes(float a, float b, float c, float d) {
    return codes_of<true>(c, d, codes_of<false>(a, b, 0));
  }
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k) {
    s.c = multiply(u32x2{k.r[0], k.r[1]}, u32x2{q.r[0], q.r[1]}, s.c);
    s.c = multiply(u32x2{k.r[2], k.r[3]}, u32x2{q.r[2], q.r[3]}, s.c);
  }
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v) {
#pragma unroll
    for (int u = 0; u < 4; ++u) o.c[u] = multiply(v.operand[u], p.r, o.c[u]);
  }
  template <int kFragments>
  MLA_DEVICE static void make_p(P& p, const Scores (&s)[kFragments], int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      p.r[half] = codes(Base::p_of(s, step, 4 * half), Base::p_of(s, step, 4 * half + 1),
                        Base::p_of(s, step, 4 * half + 2), Base::p_of(s, step, 4 * half + 3));
    }
  }

  template <int kTileRows>
  using CodeKeys = typename Base::template KeyRows<kTileRows>;
  // Turns words of four columns into operands of four rows each.
  template <int kTileRows>
  struct CodeValues : Base::template ValueCodes<kTileRows> {
    using Words = typename Base::template ValueCodes<kTileRows>;
    using typename Words::Raw;
    MLA_DEVICE CodeValues(lds_t tile_at, int lane_number) : Words(tile_at, lane_number) {}
    MLA_DEVICE static void widen(V& v, const Raw& raw) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t(&row)[4] = raw.r[half];
        // Two columns of two rows: byte 2 c + r is column c of row r.
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t pick = pair == 0 ? 0x05010400u : 0x07030602u;
          const uint32_t upper = permute_bytes(row[1], row[0], pick);
          const uint32_t lower = permute_bytes(row[3], row[2], pick);
          v.operand[2 * pair][half] = permute_bytes(lower, upper, 0x05040100u);
          v.operand[2 * pair + 1][half] = permute_bytes(lower, upper, 0x07060302u);
        }
      }
    }
  };
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_GFX942_CODE_WAVE_H_
