// Products of up to 128 rows (device/kernels/row_product.h) by two warpgroups, each with 64 rows
// and all columns of a block. Both operands lie in shared memory, so no registers hold them.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_

#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device/sm90/warpgroup.h"
#include "kernels/hip/device/sm90/wgmma.h"

namespace mla::kernels::hip {

template <int kOfStages>
struct WarpgroupProducts {
  static constexpr int kRows = 128, kWaves = 8, kStages = kOfStages, kColumns = 256;
  static constexpr int kRowsOfGroup = 64, kRun = 2;
  static constexpr int kHalves = 2, kSums = 64;  // halves of the columns, each with its sums
  // A kernel of its own is quicker: W_UQ of 128 rows takes 49 us with it on an H200, 61 without.
  static constexpr bool kFinishes = false;

  const int lane, wave, row0;
  float sums[kHalves][kSums];

  MLA_DEVICE WarpgroupProducts(int wave_number, int lane_number)
      : lane(lane_number), wave(wave_number), row0((wave_number >> 2) * kRowsOfGroup) {
#pragma unroll
    for (int i = 0; i < kHalves * kSums; ++i) sums[i / kSums][i % kSums] = 0.0f;
  }

  MLA_DEVICE static void publish() { tile::publish_shared(); }
  MLA_DEVICE void begin(uint32_t rows, uint32_t weights, int count) {
    if (row0 >= count) return;
    const uint32_t own = rows + row0 * 128;
    pin();
    tile::wgmma_begin();
#pragma unroll
    for (int step = 0; step < kRowProductDepth / 16; ++step) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        tile::multiply_rows(sums[half], tile::along_rows(own + step * 32),
                            tile::along_rows(weights + half * (128 * 128) + step * 32), 1);
      }
    }
    tile::wgmma_commit();
  }
  MLA_DEVICE void end(int count) {
    if (row0 >= count) return;
    tile::wgmma_wait<0>();
    pin();
  }
  template <class Visit>
  MLA_DEVICE void for_each_run(const Visit& visit) const {
    const int first_row = row0 + (wave & 3) * 16 + (lane >> 2), first_column = 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < kSums; i += kRun) {
        const float run[kRun] = {sums[half][i], sums[half][i + 1]};
        visit(first_row + 8 * (i >> 1 & 1), half * 128 + 8 * (i >> 2) + first_column, run);
      }
    }
  }

 private:
  MLA_DEVICE void pin() {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) tile::pin(sums[half]);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_ROW_PRODUCTS_H_
