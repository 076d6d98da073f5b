// Multiplies 8-bit floats on gfx950: v_mfma_scale 32x32x64, twice the rate of bf16.
#ifndef MLA_KERNELS_HIP_DEVICE_GFX950_CODE_WAVE_H_
#define MLA_KERNELS_HIP_DEVICE_GFX950_CODE_WAVE_H_

#include "kernels/hip/device/gfx950/tile.h"

namespace mla::kernels::hip::tile {

// As Wave<32>, with operands of codes: a lane has 32 codes of a row's depth. Queries and
// probabilities are scaled by a power of two of their row, which the product applies. Keys and
// values may be scaled by one power that all rows share.
template <int kRows_ = 32>
struct CodeWave : Wave<kRows_> {
  using Base = Wave<kRows_>;
  using Base::kGroups;
  using typename Base::Out;
  using typename Base::Scores;
  static_assert(kRows_ == 32);
  static constexpr int kDepth = 64;
  static constexpr int kPvDepth = 64;
  static constexpr int kLaneCodes = 32;
  static constexpr bool kTakesPowers = true;
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
  using Sums = Out;  // every element: sum of the row's rounded probabilities

  MLA_DEVICE static void fill(Sums& s, float x) { s.c = typename Base::Acc{} + x; }
  MLA_DEVICE static float total(const Sums& s) { return s.at(0); }
  MLA_DEVICE static void scores(Scores& s, const Q& q, const K& k, int exponent = kNoExponent) {
    s.c = multiply_codes_32x32x64(k.r, exponent, q.r, q.exponent, s.c);
  }
  MLA_DEVICE static void outputs(Out& o, const P& p, const V& v, int exponent = kNoExponent) {
    o.c = multiply_codes_32x32x64(v.r, exponent, p.r, p.exponent, o.c);
  }
  MLA_DEVICE static void add_up(Sums& sums, const P& p) {
    V ones;
#pragma unroll
    for (int i = 0; i < 8; ++i) ones.r[i] = kOnes;
    outputs(sums, p, ones);
  }

  // Rounds four numbers to a word of codes.
  MLA_DEVICE static uint32_t codes(float a, float b, float c, float d) {
    return codes_of<true>(c, d, codes_of<false>(a, b, 0));
  }
  // Holds the probabilities of a tile of 64 KV rows, made from two fragments of scores.
  template <int kFragments>
  MLA_DEVICE static void make_p(P& p, const Scores (&s)[kFragments], int) {
    static_assert(kFragments == 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Scores& from = s[i / 4];
      const int first = i % 4 * 4;
      p.r[i] = codes(from.at(first), from.at(first + 1), from.at(first + 2), from.at(first + 3));
    }
  }

  // Keys of a tile, two chunks of a row in a step; two steps are a column block. Otherwise as
  // KeyRows.
  template <int kTileRows>
  struct CodeKeys {
    static constexpr int kChunks = kLaneCodes / 16;
    lds_t addresses[4];
    MLA_DEVICE CodeKeys(lds_t tile, int row0, int lane) {
      addresses[0] =
          chunk_at<kTileRows>(tile + row0 * 128, lane & (kRows_ - 1), kChunks * Base::group(lane));
#pragma unroll
      for (int i = 1; i < 4; ++i) addresses[i] = flip(addresses[0], chunk(i) * 16);
    }
    MLA_DEVICE void load(K& k, int kv0, int step) const {
      const int place = step / 2 * (kTileRows * 128) + kv0 * 128;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const u32x4 x = shared_load<u32x4>(addresses[step % 2 * 2 + i] + place);
#pragma unroll
        for (int w = 0; w < 4; ++w) k.r[4 * i + w] = x[w];
      }
    }
    // Returns the i-th chunk that a lane reads in a column block, relative to the first.
    static constexpr int chunk(int i) { return i / 2 * (kGroups * kChunks) + i % 2; }
  };
  // Reads the values of a tile, 32 rows of a column.
  template <int kTileRows>
  struct CodeValues {
    using Codes = typename Base::template ValueCodes<kTileRows>;
    using Raw = V;
    const Codes rows;
    MLA_DEVICE CodeValues(lds_t tile, int lane) : rows(tile, lane) {}
    MLA_DEVICE void load(Raw& raw, int, int fragment) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        typename Codes::Raw x;
        rows.load(x, i, fragment);
        raw.r[2 * i] = x.r[0];
        raw.r[2 * i + 1] = x.r[1];
      }
    }
    MLA_DEVICE static void widen(V& v, const Raw& raw) { v = raw; }
  };
};

// Makes scores from codes of the latent values and bf16 of the rotated ones, and outputs as
// Wave<32> does. Queries and keys of a row are steps of 32 codes, then steps of two bf16 operands.
// Keys of each row have a power of two of their own.
struct CodeKeyWave : Wave<32> {
  using Codes = CodeWave<32>;
  static constexpr int kDepth = Codes::kDepth, kLaneCodes = Codes::kLaneCodes;
  static constexpr bool kTakesPowers = true;
  using Q = Codes::Q;
  struct K : Codes::K {
    int exponent;  // plus 127
  };

  MLA_DEVICE static uint32_t codes(float a, float b, float c, float d) {
    return Codes::codes(a, b, c, d);
  }
  MLA_DEVICE static void code_scores(Scores& s, const Q& q, const K& k) {
    s.c = multiply_codes_32x32x64(k.r, k.exponent, q.r, q.exponent, s.c);
  }
  MLA_DEVICE static void bf16_scores(Scores& s, const Q& q, const K& k) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      s.c = multiply(u32x4{k.r[i], k.r[i + 1], k.r[i + 2], k.r[i + 3]},
                     u32x4{q.r[i], q.r[i + 1], q.r[i + 2], q.r[i + 3]}, s.c);
    }
  }
};

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_DEVICE_GFX950_CODE_WAVE_H_
