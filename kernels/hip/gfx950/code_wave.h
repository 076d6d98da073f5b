// Products of 8-bit floats on gfx950: v_mfma_scale 32x32x64, twice the rate of bf16.
#ifndef MLA_KERNELS_HIP_GFX950_CODE_WAVE_H_
#define MLA_KERNELS_HIP_GFX950_CODE_WAVE_H_

#include "kernels/hip/gfx950/tile.h"

namespace mla::kernels::hip::tile {

// As Wave<32>, with operands of codes: a lane has 32 of a row's depth. Those of queries and of
// probabilities are times a power of two of their row, which the product takes along; keys and
// values may be times one that all rows share.
struct CodeWave : Wave<32> {
  static constexpr int kDepth = 64;
  static constexpr int kPvDepth = 64;
  static constexpr int kLaneCodes = 32;
  static constexpr uint32_t kOnes = 0x38383838u;
  static constexpr int kNoExponent = 127;

  struct K {
    u32x8 r;
  };
  using V = K;
  struct Q {
    u32x8 r;
    int exponent;  // plus 127
  };
  using P = Q;

  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k, int exponent = kNoExponent) {
    s.c = multiply_codes_32x32x64(k.r, exponent, q.r, q.exponent, s.c);
  }
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v, int exponent = kNoExponent) {
    o.c = multiply_codes_32x32x64(v.r, exponent, p.r, p.exponent, o.c);
  }
  // Every element becomes the sum of the row's probabilities as they are multiplied.
  MLA_DEVICE static void add_up(Out& sums, const P& p) {
    V ones;
#pragma unroll
    for (int i = 0; i < 8; ++i) ones.r[i] = kOnes;
    outputs(sums, p, ones);
  }

  // Four numbers as a word of codes.
  MLA_DEVICE static uint32_t codes(float a, float b, float c, float d) {
    return codes_of<true>(c, d, codes_of<false>(a, b, 0));
  }
  // The probabilities of a tile of 64 KV rows, as they lie in two fragments of scores.
  template <int kFragments>
  MLA_DEVICE static void make_p(P& p, const Scores (&s)[kFragments], int exponent) {
    static_assert(kFragments == 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Scores& from = s[i / 4];
      const int first = i % 4 * 4;
      p.r[i] = codes(from.at(first), from.at(first + 1), from.at(first + 2), from.at(first + 3));
    }
    p.exponent = exponent;
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_GFX950_CODE_WAVE_H_
