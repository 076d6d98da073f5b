// Widens rows of fp8_row to bf16 rows in memory of their own. It is for lists that name each row so
// often that widening it once is less work than widening it at each use.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDEN_ROWS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDEN_ROWS_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"

namespace mla::kernels::hip {

// A warp a row: a lane has 16 codes, and a word of the rotated part. widening_producer.h makes the
// same values.
class WidenRows {
 public:
  MLA_DEVICE static void run(const WidenArgs& args) {
    const int row = block_index() * kSmallWaves + tile::wave_index(), lane = tile::lane_index();
    if (row >= args.first_row[args.count]) return;
    const int index = find_range(args.first_row, args.count, row);
    const SegmentRecord& r = args.segments[index];
    const PagedRows pages(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                          r.page_size, kPageGranuleBytes);
    const uint8_t* const from = pages.row(row - args.first_row[index]);
    uint8_t* const target = args.rows + int64_t{row} * kBf16RowBytes;
    uint32_t codes[4], rotated[1];
    load_words(codes, from + lane * 16);
    const float scale = stored_scale(as_global<const float>(from + kLora)[lane / (kGroup / 16)]);
    load_words(rotated, from + kLora + kLora / kGroup * 4 + lane * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t eight[2] = {codes[2 * i], codes[2 * i + 1]};
      store_words(target + (lane * 2 + i) * 16, fp8_chunk(eight, scale).w);
    }
    store_words(target + kLora * 2 + lane * 4, rotated);
  }

 private:
  static constexpr int kLora = 512, kRope = 64, kGroup = 128;  // values a row; values a scale
  static_assert(kRope * 2 == tile::kWave * 4 && kLora == tile::kWave * 16);
  static_assert(kBf16RowBytes == (kLora + kRope) * 2);
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_WIDEN_ROWS_H_
