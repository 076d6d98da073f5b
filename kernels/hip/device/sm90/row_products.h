// Products of up to 128 rows (device/kernels/row_product.h) by two warpgroups, each with 64 rows
// and all columns of a block. Both operands lie in shared memory, so no registers hold them.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_

#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device/sm90/warpgroup.h"
#include "kernels/hip/device/sm90/wgmma.h"

namespace mla::kernels::hip {

template <class C>
struct WarpgroupProducts {
  static constexpr int kRows = 128, kWaves = 8, kStages = C::kStages, kColumns = C::kColumns;
  static constexpr int kRowsOfGroup = 64, kRun = 2, kSums = kColumns / 2;
  static constexpr bool kFinishes = true;
  static constexpr bool kAsynchronous = true;  // products run between `begin` and `end`

  const int lane, wave, row0;
  float sums[kSums];

  MLA_DEVICE WarpgroupProducts(int wave_number, int lane_number)
      : lane(lane_number), wave(wave_number), row0((wave_number >> 2) * kRowsOfGroup) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  }

  MLA_DEVICE static void publish() { tile::publish_shared(); }
  MLA_DEVICE void begin(uint32_t rows, uint32_t weights, int count) {
    if (row0 >= count) return;
    tile::pin(sums);
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kRowProductDepth / 16; ++step) {
      tile::multiply_rows(sums, tile::along_rows(rows + row0 * 128 + step * 32),
                          tile::along_rows(weights + step * 32), 1);
    }
    tile::wgmma_commit();
  }
  MLA_DEVICE void end(int count) {
    if (row0 >= count) return;
    tile::wgmma_wait<0>();
    tile::pin(sums);
  }
  template <class Visit>
  MLA_DEVICE void for_each_run(const Visit& visit) const {
    const int first_row = row0 + (wave & 3) * 16 + (lane >> 2), first_column = 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < kSums; i += kRun) {
      const float run[kRun] = {sums[i], sums[i + 1]};
      visit(first_row + 8 * (i >> 1 & 1), 8 * (i >> 2) + first_column, run);
    }
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_
