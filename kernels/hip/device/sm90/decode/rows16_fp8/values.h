// The second product of attend_fp8.h: O^T += V^T P^T.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_VALUES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_VALUES_H_

#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"

namespace mla::kernels::hip {

// Values are read transposed, in pairs of bytes. From 8 keys and 16 columns, lane l gets keys 2 (l
// % 4) and the next, at columns 2 (l / 4) and the next. In the operand, even columns are rows l / 4
// and odd columns are the rows eight further, so a thread's accumulators of both are neighbours.
template <class C>
class Fp8Values {
 public:
  using L = Fp8Layout<C>;
  using lds_t = tile::lds_t;
  static constexpr int kBlocks = C::kLora / 2 / 64;  // blocks of 64 columns of a group
  static constexpr int kProduct = C::kRows / 2;

  // Returns the first of the 16 columns that a warp multiplies in a block.
  MLA_DEVICE static int column(int group, int block, int warp) {
    return group * (C::kLora / 2) + block * 64 + warp * 16;
  }

  // Adds the tile in `slot` with the probabilities of `from_group`. kHide: values may be NaN at
  // keys whose probability is zero.
  template <bool kHide>
  MLA_DEVICE static void add(const L& shared, int slot, int from_group, int group, int warp,
                             int lane, float (&o)[kBlocks][kProduct]) {
    const uint64_t probabilities = tile::along_rows(shared.probabilities(from_group));
    uint32_t codes[2][2 * kSteps], operand[2][kSteps][4];
    uint32_t scales[kScaled ? 2 * kSteps : 1];
    if constexpr (kReadsAhead) read(shared.slot(slot), column(group, 0, warp) / 16, lane, codes[0]);
    for_constants<kBlocks>([&](auto block) {
      if constexpr (kScaled && block % 2 == 0) {
        load_scales(shared, from_group, group * 2 + block / 2, lane, scales);
      }
      if constexpr (!kReadsAhead) {
        read(shared.slot(slot), column(group, block, warp) / 16, lane, codes[block % 2]);
      } else if constexpr (block + 1 < kBlocks) {
        read(shared.slot(slot), column(group, block + 1, warp) / 16, lane, codes[(block + 1) % 2]);
      }
      widen<kHide>(codes[block % 2], scales, operand[block % 2]);
      tile::pin(o[block]);
      tile::wgmma_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::multiply_held_f16(o[block], operand[block % 2][step], probabilities + step * 2, 1);
      }
      tile::wgmma_commit();
      if constexpr (block > 0) {  // the other operand is free after this
        tile::wgmma_wait<1>();
        tile::pin(o[block - 1]);
      }
    });
    tile::wgmma_wait<0>();
    tile::pin(o[kBlocks - 1]);
  }

 private:
  static constexpr bool kScaled = L::kScaledRows;
  static constexpr int kSteps = L::kKeys / 16;
  // True if a block is read before the previous one is multiplied. Scales take the registers that
  // this needs.
  static constexpr bool kReadsAhead = !kScaled;

  // Loads the scales of keys 2 (lane % 4) and the next of every eight, in their order.
  template <int kCount>
  MLA_DEVICE static void load_scales(const L& shared, int from_group, int columns, int lane,
                                     uint32_t (&scales)[kCount]) {
    const lds_t at = shared.scales(from_group, columns) + (lane & 3) * 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) scales[i] = tile::load_word_shared(at + i * 16);
  }

  // Reads codes of 16 columns, a word for each eight keys.
  MLA_DEVICE static void read(lds_t tile_base, int chunk, int lane, uint32_t (&codes)[2 * kSteps]) {
    const int key = (lane & ~7) + key_of_row(lane & 7);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[4];
      tile::load_matrices_transposed(w,
                                     tile::chunk_at<L::kKeys>(tile_base, half * 32 + key, chunk));
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[half * 4 + i] = w[i];
    }
  }

  MLA_DEVICE static uint32_t without_nan(uint32_t codes) {
    const uint32_t nan = (((codes & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 255u;
    return codes & ~nan;
  }
  template <bool kHide, int kCount>
  MLA_DEVICE static void widen(const uint32_t (&codes)[2 * kSteps],
                               const uint32_t (&scales)[kCount], uint32_t (&operand)[kSteps][4]) {
#pragma unroll
    for (int eight = 0; eight < 2 * kSteps; ++eight) {
      const uint32_t from =
          tile::exchange_middle_bytes(kHide ? without_nan(codes[eight]) : codes[eight]);
      uint32_t even = tile::fp8_to_f16<0>(from), odd = tile::fp8_to_f16<1>(from);
      if constexpr (kScaled) {
        even = tile::multiply_f16_pairs(even, scales[eight]);
        odd = tile::multiply_f16_pairs(odd, scales[eight]);
      }
      operand[eight / 2][eight % 2 * 2] = even;
      operand[eight / 2][eight % 2 * 2 + 1] = odd;
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_VALUES_H_
