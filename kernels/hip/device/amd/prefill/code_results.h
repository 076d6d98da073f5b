// Stores up-projected keys and values as e4m3 in the workspace.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_CODE_RESULTS_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_CODE_RESULTS_H_

#include "kernels/hip/device/gfx950/code_wave.h"
#include "kernels/hip/device/primitives/expanded_pairs.h"

namespace mla::kernels::hip {

// The layout of 64 cached rows of a head. They take the place of the same bytes of each bf16 panel
// (round_info.h):
//
//   panel 0   keys: 64 rows of 128
//   panel 1   the rotated part of the keys, divided by the scale of the head's keys: row r of 32
//             holds rows r and r + 32
//   panel 2   values, transposed: row c of 64 holds columns c and c + 64, 64 rows each
//   panel 3   the exponents plus 127 of the scales of keys and of values: two words
//
// Every 64 numbers have the order of a wave's accumulators of two products of 32 rows, which is
// also the order of its operands: byte 32 g + 16 h + 4 w + b is number 32 h + 8 w + 4 g + b, held
// by lane group g. The 16-byte chunk c of a row r of 128 bytes lies at c ^ swizzle(r). Each 128
// rows of a head have one scale for keys and one for values, both powers of two. Values that are
// not finite are zero, as in bf16. Rows past the expansion's end repeat its last row; no query sees
// them.
struct CodeTile {
  static constexpr int kRows = 64;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;  // per panel, for kRows rows
  static constexpr int kKeyBytes = kRows * kDims128.nope;
  static constexpr int kRotatedBytes = kRows * kExpandedRope;
  static constexpr int kValueBytes = kRows * kDims128.value;
  static_assert(kExpandedRope == 64);

  // Returns the offset of chunk `chunk` of a row of 128 bytes.
  MLA_DEVICE static int place(int row, int chunk) {
    return row * 128 + ((chunk ^ tile::swizzle(row)) << 4);
  }
  // Returns the chunk of a row that holds lane group `group`'s part of numbers 32 * half to 32 *
  // half + 31, among the 64 numbers of the row's first half (side 0) or second half (side 1).
  MLA_DEVICE static int chunk(int side, int group, int half) { return side * 4 + group * 2 + half; }
};

// Run by four waves, each with 32 of 128 rows. W describes the accumulators.
template <KvFormat kFormat, class W>
class CodeResults {
 public:
  static constexpr int kWaves = 4, kKeys = kDims128.nope / 32, kValues = kDims128.value / 32;
  static_assert(W::kRows == 32 && kExpandedRows == kWaves * W::kRows);
  static constexpr int kScratchBytes = 128;
  static_assert(kWaves * 8 <= kScratchBytes);

  // `scratch` is kScratchBytes of shared memory that nothing else uses.
  MLA_DEVICE CodeResults(const ExpandPairs<kDims128>& of_pairs, tile::lds_t scratch_at,
                         int wave_index, int lane_index)
      : pairs(of_pairs),
        scratch(scratch_at),
        wave(wave_index),
        lane(lane_index),
        group(W::group(lane_index)),
        row(wave_index * W::kRows + (lane_index & 31)) {}

  // In `keys` a lane has columns of its row; in `values` it has rows of its column.
  MLA_DEVICE void store(const typename W::Scores (&keys)[kKeys],
                        const typename W::Out (&values)[kValues]) const {
    uint32_t rotated[kExpandedRope / 4];
    load_rotated(rotated);
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kExpandedRope / 4; ++i) {
      largest[0] =
          max_f(largest[0], max_f(magnitude(low(rotated[i])), magnitude(high(rotated[i]))));
    }
    take_largest(keys, largest[0]);
    take_largest(values, largest[1]);
    share(largest);
    const bool finite = largest[0] < infinity() && largest[1] < infinity();
    if (finite) {
      store_codes<false>(keys, values, rotated, largest);
    } else {
      exclude_from_report_begin();
      largest[0] = largest[0] < infinity() ? largest[0] : kLargest;
      largest[1] = largest[1] < infinity() ? largest[1] : kLargest;
      store_codes<true>(keys, values, rotated, largest);
      exclude_from_report_end();
    }
  }

 private:
  static constexpr float kLargest = 3.40282347e38f;
  MLA_DEVICE static float infinity() { return -negative_infinity(); }
  MLA_DEVICE static float low(uint32_t pair) { return bits_to_float(pair << 16); }
  MLA_DEVICE static float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
  MLA_DEVICE static float magnitude(float x) {
    return bits_to_float(float_to_bits(x) & 0x7fffffffu);
  }

  // Loads half of the row's rotated part in the order of operands, without the layer's scale: words
  // 8 h + 2 w and the next are numbers 32 h + 8 w + 4 g and on.
  MLA_DEVICE void load_rotated(uint32_t (&rotated)[kExpandedRope / 4]) const {
    constexpr kernels::KvRowLayout kRow =
        kernels::MakeKvRowLayout(kFormat, kExpandedLora, kExpandedRope);
    const uint8_t* const from = pairs.pages().row(pairs.position(row)) + kRow.rope_at;
#pragma unroll
    for (int i = 0; i < kExpandedRope / 8; ++i) {
      const int first = 8 * i + 4 * group;
      if constexpr (kRow.traits.rope == DType::kFp8E4m3) {
        uint32_t codes[1];
        load_words(codes, from + first);
        rotated[2 * i] = tile::plain_bf16_of<false>(codes[0]);
        rotated[2 * i + 1] = tile::plain_bf16_of<true>(codes[0]);
      } else {
        uint32_t words[2];
        load_words(words, from + 2 * first);
        rotated[2 * i] = words[0];
        rotated[2 * i + 1] = words[1];
      }
    }
  }

  template <class Sums, int kFragments>
  MLA_DEVICE static void take_largest(const Sums (&sums)[kFragments], float& largest) {
    float of[4] = {largest, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        of[i & 3] = max_f(of[i & 3], magnitude(sums[f].at(i)));
      }
    }
    largest = max_f(max_f(of[0], of[1]), max_f(of[2], of[3]));
  }
  // Maximum over the rows of all four waves; ignores NaN.
  MLA_DEVICE void share(float (&most)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = most[i];
      x = max_f(x, tile::exchange<1>(x));
      x = max_f(x, tile::exchange<2>(x));
      x = max_f(x, tile::exchange<4>(x));
      x = max_f(x, tile::exchange<8>(x));
      x = max_f(x, tile::exchange<16>(x));
      const tile::Two halves = tile::with_other_half(x);
      x = max_f(halves.x, halves.y);
      tile::store_float(scratch + wave * 8 + i * 4, x);  // the same in every lane
    }
    block_barrier();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = tile::load_float(scratch + i * 4);
#pragma unroll
      for (int w = 1; w < kWaves; ++w) {
        most[i] = max_f(most[i], tile::load_float(scratch + w * 8 + i * 4));
      }
    }
  }

  // kCareful: some numbers are not finite.
  template <bool kCareful>
  MLA_DEVICE void store_codes(const typename W::Scores (&keys)[kKeys],
                              const typename W::Out (&values)[kValues],
                              const uint32_t (&rotated)[kExpandedRope / 4],
                              const float (&most)[2]) const {
    const float power[2] = {KvGroupScale(most[0], Fp8Kind::kE4m3Fn),
                            KvGroupScale(most[1], Fp8Kind::kE4m3Fn)};
    const float inverse[2] = {KvScaleInverse(power[0]), KvScaleInverse(power[1])};
    const int inside = wave / 2 * CodeTile::kPanelBytes;  // panel offset of this wave's 64 rows
    const int of_tile = row & 63;
    uint8_t* const to_keys = pairs.panel(0) + inside;
#pragma unroll
    for (int f = 0; f < kKeys; ++f) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = codes<kCareful>(keys[f], 4 * w, inverse[0]);
      store_words(to_keys + CodeTile::place(of_tile, CodeTile::chunk(f / 2, group, f % 2)), words);
    }
    uint8_t* const to_rotated = pairs.panel(1) + inside;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t a = rotated[8 * h + 2 * w], b = rotated[8 * h + 2 * w + 1];
        words[w] = code_word<kCareful>(low(a), high(a), low(b), high(b), inverse[0]);
      }
      store_words(to_rotated + CodeTile::place(row & 31, CodeTile::chunk(wave & 1, group, h)),
                  words);
    }
    uint8_t* const to_values = pairs.panel(2) + inside;
#pragma unroll
    for (int f = 0; f < kValues; ++f) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = without_nan(codes<kCareful>(values[f], 4 * w, inverse[1]));
      }
      store_words(to_values + CodeTile::place(f % 2 * 32 + (lane & 31),
                                              CodeTile::chunk(f / 2, group, wave & 1)),
                  words);
    }
    if (wave % 2 == 0 && lane == 0) {
      const uint32_t words[2] = {float_to_bits(power[0]) >> 23, float_to_bits(power[1]) >> 23};
      store_words(pairs.panel(3) + inside, words);
    }
  }
  template <bool kCareful, class Sums>
  MLA_DEVICE static uint32_t codes(const Sums& sums, int first, float by) {
    return code_word<kCareful>(sums.at(first), sums.at(first + 1), sums.at(first + 2),
                               sums.at(first + 3), by);
  }
  template <bool kCareful>
  MLA_DEVICE static uint32_t code_word(float a, float b, float c, float d, float by) {
    if constexpr (kCareful) {
      a = nan_unless_finite(a);
      b = nan_unless_finite(b);
      c = nan_unless_finite(c);
      d = nan_unless_finite(d);
    }
    return tile::CodeWave<>::codes(a * by, b * by, c * by, d * by);
  }
  MLA_DEVICE static float nan_unless_finite(float x) {
    return magnitude(x) < infinity() ? x : bits_to_float(0x7fc00000u);
  }
  // Sets bytes of 0x7f and 0xff to zero.
  MLA_DEVICE static uint32_t without_nan(uint32_t word) {
    const uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u;
    return word & ~(nan * 255u);
  }

  const ExpandPairs<kDims128>& pairs;
  const tile::lds_t scratch;
  const int wave, lane, group, row;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_PREFILL_CODE_RESULTS_H_
