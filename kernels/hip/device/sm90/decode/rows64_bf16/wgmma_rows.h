// Stores the outputs of the packed rows of a computing group of attend_wgmma.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_ROWS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_ROWS_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip {

// `o` are a thread's accumulators: of every four, two neighbouring columns of the row of slot 0 and
// two of the row of slot 1. `mine`: the row of this slot exists. `index`: where the group's columns
// begin in the target.
template <int kOutputs>
struct WgmmaRows {
  const float (&o)[kOutputs];
  const int lane;

  MLA_DEVICE void write_pairs(const RowTarget& target, int64_t index, int slot, bool mine,
                              bool aligned) const {
    if (!mine) return;
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 4) {
      const float run[2] = {o[i], o[i + 1]};
      store_run(target.base, index + 2 * (i - 2 * slot) + 2 * (lane & 3), run, target.f32, aligned);
    }
  }
  // Lanes of a row exchange pairs, so that each lane stores 16 bytes at once. For fp32, neighbours
  // swap the pairs of two column blocks of 8.
  MLA_DEVICE void write_f32(const RowTarget& target, int64_t index, int slot, bool mine) const {
    const bool odd = (lane & 1) != 0;
    const int column = odd ? 8 + 2 * (lane & 3) - 2 : 2 * (lane & 3);
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = o[i + e], b = o[i + 4 + e];
        const float got = tile::exchange<1>(odd ? a : b);
        words[e] = float_to_bits(odd ? got : a);
        words[2 + e] = float_to_bits(odd ? b : got);
      }
      if (mine) {
        store_words(static_cast<float*>(target.base) + index + 2 * (i - 2 * slot) + column, words);
      }
    }
  }
  // For bf16, the four lanes transpose 4 x 4 words; each then holds one column block of 8.
  MLA_DEVICE void write_bf16(const RowTarget& target, int64_t index, int slot, bool mine) const {
    const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
#pragma unroll
    for (int i = 2 * slot; i < kOutputs; i += 16) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = pack_bf16(o[i + 4 * k], o[i + 4 * k + 1]);
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const uint32_t got = exchange_words<1>(odd ? w[k] : w[k + 1]);
        w[k] = odd ? got : w[k];
        w[k + 1] = odd ? w[k + 1] : got;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t got = exchange_words<2>(high ? w[k] : w[k + 2]);
        w[k] = high ? got : w[k];
        w[k + 2] = high ? w[k + 2] : got;
      }
      if (mine) {
        store_words(
            static_cast<uint16_t*>(target.base) + index + 2 * (i - 2 * slot) + 8 * (lane & 3), w);
      }
    }
  }
  template <int kStep>
  MLA_DEVICE static uint32_t exchange_words(uint32_t x) {
    return float_to_bits(tile::exchange<kStep>(bits_to_float(x)));
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_ROWS_H_
