// The groups of attend_e4m3.h that sum values and write results.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_VALUES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_VALUES_H_

#include "kernels/hip/device/sm90/decode/rows64_codes/columns.h"
#include "kernels/hip/device/sm90/decode/rows64_codes/layout.h"

namespace mla::kernels::hip {

// One of two groups: O^T [256 columns x 64 rows] += V^T P^T. V^T is the operand in registers, and
// probabilities store their keys in its order.
//
// The matrix unit aligns addends to the largest and keeps 13 bits below it. So it sums only the 64
// keys of one tile; sums of tiles are added in fp32, times a factor of the tile and row.
template <class C, class Args = AttendArgs>
class E4m3Values : E4m3Columns<C, E4m3Layout<C>, Args> {
 public:
  using L = E4m3Layout<C>;
  using Base = E4m3Columns<C, L, Args>;

  MLA_DEVICE E4m3Values(const Args& a, const L& layout)
      : Base(a, layout, (tile::wave_index() >> 2) - 1) {}

  // The item is loaded again for its results, because keeping it would take registers.
  MLA_DEVICE void attend(const Item& item, int index, int share) {
    float o[kBlocks][kProduct];
    Base::clear(o);
    // Remaining keys, and keys before the first that may be hidden. With lists, any key may be
    // hidden. Boxes bring rows past the item's end, which may hold NaN.
    const RowSource<C::kAttention> source(args, item);
    int left = source.end - source.begin, plain = L::kLists ? 0 : item.limit(0) - source.begin;
    if (!Args::kBoxes && plain >= left) plain = kAllPlain;
    for (; left > 0; left -= C::kTileKv) {
      plain -= C::kTileKv;
      add(plain < 0, o);
    }
    finish(load_item<L::kRows>(args, index, share), o);
  }

 private:
  using Base::args, Base::shared, Base::lane;
  using Base::kBlocks, Base::kProduct, Base::column, Base::row;
  using typename Base::lds_t;
  static constexpr int kAllPlain = 1 << 30;
  static constexpr int kSteps = L::kKeys / 32;  // steps of a tile

  // Adds the next tile. `hide`: values of unseen keys may be NaN.
  MLA_DEVICE void add(bool hide, float (&o)[kBlocks][kProduct]) {
    const int slot = ring.slot;
    tile::barrier_wait(shared.published(slot), ring.parity);
    ring.next();
    Base::follow_origins(slot, o);
    // No wait for the slot: the scorers had seen it filled before they published.
    if (L::kLists || hide) {
      add_blocks<true>(slot, o);
    } else {
      add_blocks<false>(slot, o);
    }
    // Freed only here, because the scorers write the slot's next factors once it is filled again.
    if (lane == 0) {
      tile::barrier_arrive(shared.emptied(slot));
      tile::barrier_arrive(shared.adopted(slot));
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
      tile::pin(o[block]);  // before the registers of the sums are reused
    });
  }
  // Reads codes of 16 columns and all keys of a slot.
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
    Base::store_results(item, o, [this](int j, float(&by)[2]) {
      tile::load_two_floats(by, shared.result_scale() + row(j, 0) * 4);
    });
    tile::barrier_arrive(shared.taken());
  }

  Ring<L::kSlots> ring;
  uint32_t items = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_VALUES_H_
