// The groups of attend_e4m3.h that sum values and write results.
#ifndef MLA_KERNELS_HIP_SM90_E4M3_VALUES_H_
#define MLA_KERNELS_HIP_SM90_E4M3_VALUES_H_

#include "kernels/hip/common/item.h"
#include "kernels/hip/sm90/e4m3/layout.h"

namespace mla::kernels::hip {

// One of two groups: O^T [256 columns x 64 rows] += V^T P^T. V^T is the operand in registers:
// values are read transposed in pairs of bytes, so that of 16 keys and 16 columns lane l has keys
// 2 (l % 4), the next, and eight further of each, at columns 2 (l / 4) and the next. Even columns
// are rows l / 4 of the operand and odd ones eight further; probabilities have their keys in the
// same order.
//
// The matrix unit adds with 13 bits below the largest, so it sums the 64 keys of a tile alone;
// those sums are added in fp32, times a factor of the tile and row.
template <class C>
class E4m3Values {
 public:
  using L = E4m3Layout<C>;

  MLA_DEVICE E4m3Values(const AttendArgs& a, const L& layout)
      : args(a),
        shared(layout),
        group((tile::wave_index() >> 2) - 1),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  // The item is read again for its results, rather than held in registers meanwhile.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    float o[kBlocks][kProduct];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kProduct; ++i) o[b][i] = 0.0f;
    }
    // Keys that are left, and keys until some may be hidden: lists may name such ones anywhere.
    const RowSource<C::kAttention> source(args, item);
    int left = source.end - source.begin, plain = L::kLists ? 0 : item.limit(0) - source.begin;
    if (plain >= left) plain = kAllPlain;
    for (; left > 0; left -= C::kTileKv) {
      plain -= C::kTileKv;
      add(plain < 0, o);
    }
    finish(load_item<L::kRows>(args, index, share), o);
  }

 private:
  using lds_t = tile::lds_t;
  static constexpr int kBlocks = C::kLora / 2 / 64;  // of 64 columns, of a group
  static constexpr int kProduct = 32;                // accumulators of 64 x 64, of a thread
  static constexpr int kAllPlain = 1 << 30;
  static constexpr int kSteps = L::kKeys / 32;  // of a tile

  // First of the 16 columns that a warp multiplies in a block.
  MLA_DEVICE int column(int block) const { return group * (C::kLora / 2) + block * 64 + warp * 16; }
  // Packed row of accumulators 4 j + e and 4 j + 2 + e.
  MLA_DEVICE int row(int j, int e) const { return 8 * j + 2 * (lane & 3) + e; }

  // The next tile. `hide`: values of keys that are not seen may be no numbers.
  MLA_DEVICE void add(bool hide, float (&o)[kBlocks][kProduct]) {
    const int slot = ring.at;
    tile::barrier_wait(shared.published(slot), ring.parity);
    ring.next();
    const Chunk moved = tile::load_chunk_shared(shared.moved(slot));
    if ((moved.w[0] | moved.w[1] | moved.w[2] | moved.w[3]) != 0) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) scale_by(shared.old_factor(slot), o[b]);
    }
    // The scorers have seen that the slot is filled before they published.
    if (hide) {
      add_blocks<true>(slot, o);
    } else {
      add_blocks<false>(slot, o);
    }
    // The scorers write the slot's next factors once it is filled again, so it is free only now.
    if (lane == 0) {
      tile::barrier_arrive(shared.emptied(slot));
      tile::barrier_arrive(shared.adopted(slot));
    }
  }
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
  MLA_DEVICE void add_blocks(int slot, float (&o)[kBlocks][kProduct]) const {
    const uint64_t probabilities = tile::along_narrow_rows(shared.probabilities(slot));
    const lds_t factors = shared.factor(slot) + row(0, 0) * 4;
    for_constants<kBlocks>([&](auto block) {
      uint32_t operand[kSteps][4];
      read<kHide>(slot, column(block) / 16, operand);
      float sums[kProduct];
      tile::pin(sums);
      tile::wgmma_begin();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::multiply_held_e4m3(sums, operand[step], probabilities + step * 2, step > 0);
      }
      tile::wgmma_commit();
      tile::wgmma_wait<0>();
      tile::pin(sums);
#pragma unroll
      for (int j = 0; j < L::kRows / 8; ++j) {
        float by[2];
        tile::load_two_floats(by, factors + j * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          o[block][4 * j + i] = fma_f(sums[4 * j + i], by[i & 1], o[block][4 * j + i]);
        }
      }
      tile::pin(o[block]);  // before the registers of the sums are wanted again
    });
  }
  // Codes of 16 columns and the keys of a slot.
  template <bool kHide>
  MLA_DEVICE void read(int slot, int chunk, uint32_t (&operand)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t w[4];
      tile::load_matrices_transposed(
          w, tile::chunk_at<L::kKeys>(shared.slot(slot), step * 32 + lane, chunk));
      operand[step][0] = tile::choose_bytes<0x6420>(w[0], w[1]);
      operand[step][1] = tile::choose_bytes<0x7531>(w[0], w[1]);
      operand[step][2] = tile::choose_bytes<0x6420>(w[2], w[3]);
      operand[step][3] = tile::choose_bytes<0x7531>(w[2], w[3]);
      if constexpr (kHide) {
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[step][i] = without_nan(operand[step][i]);
      }
    }
  }
  MLA_DEVICE static uint32_t without_nan(uint32_t codes) {
    const uint32_t nan = (((codes & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 255u;
    return codes & ~nan;
  }

  MLA_DEVICE void finish(const Item& item, const float (&o)[kBlocks][kProduct]) {
    tile::barrier_wait(shared.summed(), items++ & 1);
    const bool aligned = aligned_results(args, item, 2);
#pragma unroll
    for (int j = 0; j < L::kRows / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int p = row(j, e);
        if (p >= item.rows) continue;
        const float by = tile::load_float(shared.result_scale() + p * 4);
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
    tile::barrier_arrive(shared.taken());
  }

  const AttendArgs& args;
  const L shared;
  const int group, warp, lane;
  Ring<L::kSlots> ring;
  uint32_t items = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SM90_E4M3_VALUES_H_
