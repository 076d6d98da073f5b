// The second product of attend_rows.h: O^T += V^T P^T.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_VALUES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_VALUES_H_

#include "kernels/hip/device/sm90/decode/rows64_codes/columns.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/rows_layout.h"

namespace mla::kernels::hip {

// O^T [256 columns x 64 rows] of a group. V^T is the operand in registers, widened to binary16. If
// keys of a tile have several scales each, it is multiplied by the ratios of these scales to the
// key's power of two.
template <class C, class Args = AttendArgs>
class E4m3RowsValues : E4m3Columns<C, E4m3RowsLayout<C>, Args> {
 public:
  using L = E4m3RowsLayout<C>;
  using Base = E4m3Columns<C, L, Args>;
  using Base::clear, Base::kBlocks, Base::kProduct;

  MLA_DEVICE E4m3RowsValues(const Args& a, const L& layout)
      : Base(a, layout, tile::wave_index() >> 2) {}

  // Adds tile `number`, after waiting for its probabilities.
  MLA_DEVICE void add(uint32_t number, bool hide, float (&o)[kBlocks][kProduct]) const {
    const int slot = static_cast<int>(number % L::kSlots);
    tile::barrier_wait(shared.published(static_cast<int>(number & 1)), number >> 1 & 1);
    Base::follow_origins(slot, o);
    const uint64_t p = tile::along_rows(shared.probabilities(static_cast<int>(number & 1)));
    const bool one_scale = shared.has_one_scale(slot);
    if ((hide && !L::kLists) || !one_scale) {
      add_blocks<true, true>(slot, p, o);
    } else {
      add_blocks<L::kLists, false>(slot, p, o);
    }
    if (lane == 0) {
      tile::barrier_arrive(shared.emptied(slot));
      tile::barrier_arrive(shared.adopted(static_cast<int>(number & 1)));
    }
  }

  MLA_DEVICE void finish(const Item& item, const float (&o)[kBlocks][kProduct]) const {
    Base::store_results(item, o, [this](int j, float(&by)[2]) {
      float sums[2][2];
      tile::load_two_floats(sums[0], shared.sums(0) + row(j, 0) * 4);
      tile::load_two_floats(sums[1], shared.sums(1) + row(j, 0) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = sums[0][e] + sums[1][e];
        by[e] = sum == 0.0f ? 0.0f : 1.0f / sum;
      }
    });
  }

 private:
  using Base::column, Base::row;
  using Base::shared, Base::lane;
  static constexpr int kSteps = L::kKeys / 16;  // steps of a tile
  // The largest finite binary16 number, twice. Values are limited to it, so that their products
  // with zero are zero.
  static constexpr uint32_t kLargestPair = 0x7bff7bffu;

  // kHide: values that are not finite are made finite. kScale: keys have scales of their own for
  // blocks.
  template <bool kHide, bool kScale>
  MLA_DEVICE void add_blocks(int slot, uint64_t probabilities,
                             float (&o)[kBlocks][kProduct]) const {
    uint32_t operand[2][kSteps][4];
    float ratios[kSteps][2];
    uint32_t codes[kSteps / 2][4];  // codes of the next block, read during this block's products
    for_constants<kBlocks>([&](auto block) {
      if constexpr (kScale && block % 2 == 0) {  // two blocks of 64 columns share a scale
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          tile::load_two_floats(
              ratios[step],
              this->shared.ratios(slot, step, this->group * (L::kBlocks / 2) + block / 2) +
                  (this->lane & 3) * 8);
        }
      }
      if constexpr (block == 0) read(slot, 0, codes);
      widen<kHide, kScale>(codes, ratios, operand[block % 2]);
      if constexpr (block + 1 < Base::kBlocks) read(slot, block + 1, codes);
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
  // Reads codes of a slot's keys, for the 16 columns that a warp multiplies in a block.
  MLA_DEVICE void read(int slot, int block, uint32_t (&codes)[kSteps / 2][4]) const {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      tile::load_matrices_transposed(
          codes[pair],
          tile::chunk_at<L::kKeys>(shared.slot(slot), pair * 32 + lane, column(block) / 16));
    }
  }
  // Widens values, divided by the keys' powers of two.
  template <bool kHide, bool kScale>
  MLA_DEVICE void widen(const uint32_t (&codes)[kSteps / 2][4], const float (&ratios)[kSteps][2],
                        uint32_t (&operand)[kSteps][4]) const {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      const uint32_t(&w)[4] = codes[pair];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * pair + half;
        const uint32_t even = tile::choose_bytes<0x6420>(w[2 * half], w[2 * half + 1]);
        const uint32_t odd = tile::choose_bytes<0x7531>(w[2 * half], w[2 * half + 1]);
        uint32_t(&x)[4] = operand[step];
        x[0] = tile::fp8_to_f16<0>(even);
        x[1] = tile::fp8_to_f16<0>(odd);
        x[2] = tile::fp8_to_f16<1>(even);
        x[3] = tile::fp8_to_f16<1>(odd);
        if constexpr (kScale) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = tile::multiply_f16_pairs(x[i], float_to_bits(ratios[step][i >> 1]));
          }
        }
        if constexpr (kHide) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = tile::less_of_f16_pairs(x[i], kLargestPair);
        }
      }
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_VALUES_H_
