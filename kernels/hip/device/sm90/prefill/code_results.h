// Stores up-projected keys and values as e4m3 in the workspace.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_RESULTS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_RESULTS_H_

#include "kernels/hip/device/primitives/expanded_pairs.h"
#include "kernels/hip/device/sm90/code_scale.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"
#include "kernels/hip/device/sm90/warpgroup.h"

namespace mla::kernels::hip {

inline constexpr int kCodeScratchBytes = 16;  // a float a warp of a warpgroup

// Layout of a head and a tile of 128 cached rows, which replace bf16 panels (round_info.h):
//
//   panel 0   keys [128 rows x 128 bytes]
//   panel 1   the rotated part of the keys [128 rows x 64 bytes], divided by the keys' scale
//   panel 2   values, transposed [128 columns x 128 rows]
//   panel 3   the scales of keys and of values, two floats
//
// Columns of keys and rows of values are permuted within each 16: position 4 i + b holds number 2 i
// + b % 2 + 8 (b / 2), the order of the accumulators of two neighbouring products in a lane. Scales
// are powers of two. Values that are NaN are zero, as in bf16. Rows past the expansion's end repeat
// its last row; no query sees them.
//
// Run by the 128 threads of a warpgroup; `c` holds its accumulators of 128 x 128.
template <KvFormat kFormat, int kBarrier>
class CodeResults {
 public:
  using Accumulators = float[2][64];

  // `results` is 16 KiB. kBarrier is a named barrier of the group.
  MLA_DEVICE CodeResults(uint32_t results_at, uint32_t scratch_at, int thread_of_group)
      : results(results_at), scratch(scratch_at), thread(thread_of_group) {}

  // Loads the rotated part of a new tile: thread t has its row t.
  MLA_DEVICE void take_rotated(const ExpandPairs<kDims128>& pairs) {
    constexpr kernels::KvRowLayout kRow =
        kernels::MakeKvRowLayout(kFormat, kExpandedLora, kExpandedRope);
    rotated = pairs.pages().row(pairs.position(thread)) + kRow.rope_at;
    most_rotated = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      float x[16];
      load_rotated(i, x);
#pragma unroll
      for (int e = 0; e < 16; ++e) most_rotated = max_f(most_rotated, magnitude(x[e]));
    }
  }

  MLA_DEVICE void store_keys(const ExpandPairs<kDims128>& pairs, const Accumulators& c) {
    const CodeScale scale = scale_of(c, most_rotated);
    store<false>(pairs.panel(0), c, scale.inverse);
    uint8_t* const target = pairs.panel(1) + thread * 64;
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      float x[16];
      load_rotated(i, x);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = codes(x[2 * w], x[2 * w + 1], x[8 + 2 * w], x[9 + 2 * w], scale.inverse);
      }
      store_words(target + ((i ^ narrow_swizzle(thread)) << 4), words);
    }
    if (thread == 0) *scales(pairs) = scale.power;
  }

  // c is transposed: its rows are columns of values.
  MLA_DEVICE void store_values(const ExpandPairs<kDims128>& pairs, const Accumulators& c) {
    const CodeScale scale = scale_of(c, 0.0f);
    store<true>(pairs.panel(2), c, scale.inverse);
    if (thread == 0) scales(pairs)[1] = scale.power;
  }

 private:
  static constexpr int kGroups = kExpandedRope / 16;
  MLA_DEVICE static float magnitude(float x) {
    return bits_to_float(float_to_bits(x) & 0x7fffffffu);
  }
  MLA_DEVICE static uint32_t codes(float x0, float x1, float x2, float x3, float by) {
    return tile::pack_e4m3(x0 * by, x1 * by, x2 * by, x3 * by);
  }
  MLA_DEVICE static uint32_t without_nan(uint32_t codes) {
    const uint32_t nan = (((codes & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 255u;
    return codes & ~nan;
  }
  MLA_DEVICE static float* scales(const ExpandPairs<kDims128>& pairs) {
    return reinterpret_cast<float*>(pairs.panel(3));
  }
  MLA_DEVICE void sync() const { tile::named_sync<kBarrier, 128>(); }

  // Loads sixteen values of the rotated row, without the layer's scale.
  MLA_DEVICE void load_rotated(int group, float (&x)[16]) const {
    uint32_t words[8];
    if constexpr (kFormat == KvFormat::kFp8Tensor) {
      uint32_t w[4];
      load_words(w, rotated + group * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[2 * i] = tile::plain_bf16_of<false>(w[i]);
        words[2 * i + 1] = tile::plain_bf16_of<true>(w[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t w[4];
        load_words(w, rotated + group * 32 + i * 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[4 * i + k] = w[k];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[2 * i] = bits_to_float(words[i] << 16);
      x[2 * i + 1] = bits_to_float(words[i] & 0xffff0000u);
    }
  }

  // Returns the scale for the largest magnitude of the group's numbers and of `own`, ignoring NaN.
  // When it returns, the previous store has finished reading `results`.
  MLA_DEVICE CodeScale scale_of(const Accumulators& c, float own) const {
    float largest[4] = {own, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 64; ++i) largest[i & 3] = max_f(largest[i & 3], magnitude(c[half][i]));
    }
    float all = max_f(max_f(largest[0], largest[1]), max_f(largest[2], largest[3]));
    all = max_f(all, tile::exchange<1>(all));
    all = max_f(all, tile::exchange<2>(all));
    all = max_f(all, tile::exchange<4>(all));
    all = max_f(all, tile::exchange<8>(all));
    all = max_f(all, tile::exchange<16>(all));
    if ((thread & 31) == 0) tile::store_float(scratch + (thread >> 5) * 4, all);
    if (thread == 0) tile::wait_for_stores_to_read();
    sync();
    const Chunk each = tile::load_chunk_shared(scratch);
#pragma unroll
    for (int w = 0; w < 4; ++w) all = max_f(all, bits_to_float(each.w[w]));
    return code_scale(float_to_bits(all));
  }

  template <bool kNanIsZero>
  MLA_DEVICE void store(uint8_t* target, const Accumulators& c, float inverse) const {
    const int lane = thread & 31;
    // Chunk lane / 8 of row lane % 8 of the warp's first eight.
    const uint32_t address =
        tile::chunk_at<kExpandedRows>(results, (thread >> 5) * 16 + (lane & 7), lane >> 3);
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      const int half = eight >> 1, h = eight & 1;
#pragma unroll
      for (int first = 0; first < 8; first += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int e = 8 * (first + i) + 2 * h;
          words[i] = codes(c[half][e], c[half][e + 1], c[half][e + 4], c[half][e + 5], inverse);
          if constexpr (kNanIsZero) words[i] = without_nan(words[i]);
        }
        tile::store_matrices((address ^ first << 4) + (half * 64 + h * 8) * 128, words[0], words[1],
                             words[2], words[3]);
      }
    }
    tile::publish_shared();
    sync();
    if (thread == 0) tile::bulk_store(target, results, kExpandedRows * 128);
  }

  const uint32_t results, scratch;
  const int thread;
  const uint8_t* rotated = nullptr;
  float most_rotated = 0.0f;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_PREFILL_CODE_RESULTS_H_
