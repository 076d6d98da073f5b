// The second product of attend_rows.h: O^T += V^T P^T.
#ifndef MLA_KERNELS_HIP_SM90_E4M3_ROWS_VALUES_H_
#define MLA_KERNELS_HIP_SM90_E4M3_ROWS_VALUES_H_

#include "kernels/hip/common/item.h"
#include "kernels/hip/sm90/e4m3/rows_layout.h"

namespace mla::kernels::hip {

// O^T [256 columns x 64 rows] of a group. V^T is the operand in registers: values are read
// transposed in pairs of bytes and widened to binary16, so that of 16 keys and 16 columns lane l
// has keys 2 (l % 4), the next, and eight further of each, at columns 2 (l / 4) and the next. Even
// columns are rows l / 4 of the operand and odd ones eight further.
template <class C>
class E4m3RowsValues {
 public:
  using L = E4m3RowsLayout<C>;
  static constexpr int kBlocks = C::kLora / 2 / 64;  // of 64 columns, of a group
  static constexpr int kProduct = 32;                // accumulators of 64 x 64, of a thread

  MLA_DEVICE E4m3RowsValues(const AttendArgs& a, const L& layout)
      : args(a),
        shared(layout),
        group(tile::wave_index() >> 2),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  MLA_DEVICE static void clear(float (&o)[kBlocks][kProduct]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kProduct; ++i) o[b][i] = 0.0f;
    }
  }

  // Adds tile `number` once its probabilities are there.
  MLA_DEVICE void add(uint32_t number, bool hide, float (&o)[kBlocks][kProduct]) const {
    const int slot = static_cast<int>(number % L::kSlots);
    tile::barrier_wait(shared.published(static_cast<int>(number & 1)), number >> 1 & 1);
    const Chunk moved = tile::load_chunk_shared(shared.moved(slot));
    if ((moved.w[0] | moved.w[1] | moved.w[2] | moved.w[3]) != 0) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) scale_by(shared.old_factor(slot), o[b]);
    }
    const uint64_t p = tile::along_rows(shared.probabilities(static_cast<int>(number & 1)));
    if (hide) {
      add_blocks<true>(slot, p, o);
    } else {
      add_blocks<false>(slot, p, o);
    }
    if (lane == 0) {
      tile::barrier_arrive(shared.emptied(slot));
      tile::barrier_arrive(shared.adopted(static_cast<int>(number & 1)));
    }
  }

  MLA_DEVICE void finish(const Item& item, const float (&o)[kBlocks][kProduct]) const {
    const bool aligned = aligned_results(args, item, 2);
#pragma unroll
    for (int j = 0; j < L::kRows / 8; ++j) {
      float sums[2][2];
      tile::load_two_floats(sums[0], shared.sums(0) + row(j, 0) * 4);
      tile::load_two_floats(sums[1], shared.sums(1) + row(j, 0) * 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int p = row(j, e);
        if (p >= item.rows) continue;
        const float sum = sums[0][e] + sums[1][e];
        const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
        const RowTarget target(args, item, p, C::kLora);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          // A row without keys gives zeros whatever values it has met.
          const float run[2] = {by == 0.0f ? 0.0f : o[b][4 * j + e] * by,
                                by == 0.0f ? 0.0f : o[b][4 * j + 2 + e] * by};
          store_run(target.base, target.index + column(b) + 2 * (lane >> 2), run, target.f32,
                    aligned);
        }
      }
    }
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kSteps = L::kKeys / 16;  // of a tile

  // First of the 16 columns that a warp multiplies in a block.
  MLA_DEVICE int column(int block) const { return group * (C::kLora / 2) + block * 64 + warp * 16; }
  // Packed row of accumulators 4 j + e and 4 j + 2 + e.
  MLA_DEVICE int row(int j, int e) const { return 8 * j + 2 * (lane & 3) + e; }

  // By a factor of each packed row.
  MLA_DEVICE void scale_by(lds_t factors, float (&x)[kProduct]) const {
#pragma unroll
    for (int j = 0; j < L::kRows / 8; ++j) {
      float by[2];
      tile::load_two_floats(by, factors + row(j, 0) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] *= by[i & 1];
    }
  }

  template <bool kHide>
  MLA_DEVICE void add_blocks(int slot, uint64_t probabilities,
                             float (&o)[kBlocks][kProduct]) const {
    uint32_t operand[2][kSteps][4];
    float ratios[kSteps][2];
    for_constants<kBlocks>([&](auto block) {
      if constexpr (block % 2 == 0) {  // 64 columns are half of what has a scale
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          tile::load_two_floats(
              ratios[step],
              shared.ratios(slot, step, group * (L::kBlocks / 2) + block / 2) + (lane & 3) * 8);
        }
      }
      read<kHide>(slot, column(block) / 16, ratios, operand[block % 2]);
      tile::pin(o[block]);
      tile::wgmma_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::multiply_held_f16(o[block], operand[block % 2][step], probabilities + step * 2, 1);
      }
      tile::wgmma_commit();
      if constexpr (block > 0) {  // so that the other operand may be written
        tile::wgmma_wait<1>();
        tile::pin(o[block - 1]);
      }
    });
    tile::wgmma_wait<0>();
    tile::pin(o[kBlocks - 1]);
  }
  // Values of 16 columns and the keys of a slot, over the keys' powers of two.
  template <bool kHide>
  MLA_DEVICE void read(int slot, int chunk, const float (&ratios)[kSteps][2],
                       uint32_t (&operand)[kSteps][4]) const {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t w[4];
      tile::load_matrices_transposed(
          w, tile::chunk_at<L::kKeys>(shared.slot(slot), pair * 32 + lane, chunk));
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = tile::multiply_f16_pairs(x[i], float_to_bits(ratios[step][i >> 1]));
        }
        if constexpr (kHide) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = without_nan(x[i]);
        }
      }
    }
  }
  // Of two binary16 numbers.
  MLA_DEVICE static uint32_t without_nan(uint32_t pair) {
    const uint32_t nan = (((pair & 0x7c007c00u) + 0x04000400u) >> 15 & 0x00010001u) * 0xffffu;
    return pair & ~nan;
  }

  const AttendArgs& args;
  const L shared;
  const int group, warp, lane;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_E4M3_ROWS_VALUES_H_
