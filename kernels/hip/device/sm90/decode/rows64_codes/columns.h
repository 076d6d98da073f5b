// Code shared by the groups that sum values in attend_e4m3.h and attend_rows.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COLUMNS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COLUMNS_H_

#include "kernels/hip/device/primitives/item.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip {

// Accumulators O^T [256 columns x 64 rows] of one of two groups. Values are read transposed, in
// pairs of bytes. From 16 keys and 16 columns, lane l gets keys 2 (l % 4) and the next, and the two
// keys eight further, each at columns 2 (l / 4) and the next. Even columns are rows l / 4 of the
// operand, and odd columns are the rows eight further. L: the layout of shared memory.
template <class C, class L, class Args = AttendArgs>
class E4m3Columns {
 public:
  static constexpr int kBlocks = C::kLora / 2 / 64;  // blocks of 64 columns of a group
  static constexpr int kProduct = 32;                // accumulators of 64 x 64, a thread

  MLA_DEVICE static void clear(float (&o)[kBlocks][kProduct]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kProduct; ++i) o[b][i] = 0.0f;
    }
  }

 protected:
  using lds_t = tile::lds_t;

  MLA_DEVICE E4m3Columns(const Args& a, const L& layout, int of_groups)
      : args(a),
        shared(layout),
        group(of_groups),
        warp(tile::wave_index() & 3),
        lane(tile::lane_index()) {}

  // Returns the first of the 16 columns that a warp multiplies in a block.
  MLA_DEVICE int column(int block) const { return group * (C::kLora / 2) + block * 64 + warp * 16; }
  // Packed row of accumulators 4 j + e and 4 j + 2 + e.
  MLA_DEVICE int row(int j, int e) const { return 8 * j + 2 * (lane & 3) + e; }

  // Rescales the sums so far to the origins of a slot's tile.
  MLA_DEVICE void follow_origins(int slot, float (&o)[kBlocks][kProduct]) const {
    const Chunk moved = tile::load_chunk_shared(shared.moved(slot));
    if ((moved.w[0] | moved.w[1] | moved.w[2] | moved.w[3]) == 0) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < L::kRows / 8; ++j) {
        float by[2];
        tile::load_two_floats(by, shared.old_factor(slot) + row(j, 0) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][4 * j + i] *= by[i & 1];
      }
    }
  }

  // scales(j, by) gives the scales of rows row(j, 0) and row(j, 1). They are zero for rows without
  // keys, whose results are zero whatever values were summed.
  template <class Scales>
  MLA_DEVICE void store_results(const Item& item, const float (&o)[kBlocks][kProduct],
                                const Scales& scales) const {
    if (Args::kSplit || item.work.partial_row >= 0) {
      store_part(item, o, scales);
      return;
    }
    const bool aligned = aligned_results(args, item, 2);
#pragma unroll
    for (int j = 0; j < L::kRows / 8; ++j) {
      float by[2];
      scales(j, by);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int p = row(j, e);
        if (p >= item.rows) continue;
        const RowTarget target(args, item, p, C::kLora);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const float run[2] = {by[e] == 0.0f ? 0.0f : o[b][4 * j + e] * by[e],
                                by[e] == 0.0f ? 0.0f : o[b][4 * j + 2 + e] * by[e]};
          store_run(target.base, target.index + column(b) + 2 * (lane >> 2), run, target.f32,
                    aligned);
        }
      }
    }
  }

  // Stores a part in the order PartOrder::kPaired: eight lanes store 32 values of a row at a time.
  // It is short code, because small launches fetch their code from memory.
  template <class Scales>
  MLA_DEVICE void store_part(const Item& item, const float (&o)[kBlocks][kProduct],
                             const Scales& scales) const {
    const int64_t first = static_cast<int64_t>(item.work.partial_row) + item.first;
    // Hidden from the compiler, which would keep a column made from it over all items.
    const auto of_lane = static_cast<int>(tile::unknown(static_cast<uint32_t>(lane)));
    const int64_t part =
        first * C::kLora + group * (C::kLora / 2) + (warp * 8 + (of_lane >> 2)) * 4;
#pragma unroll
    for (int j = 0; j < L::kRows / 8; ++j) {
      float by[2];
      scales(j, by);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int p = row(j, e), i = 4 * j + e;
        if (p >= item.rows) continue;
        const bool empty = by[e] == 0.0f;
#pragma unroll
        for (int b = 0; b < kBlocks; b += 2) {
          const float run[4] = {empty ? 0.0f : o[b][i] * by[e], empty ? 0.0f : o[b][i + 2] * by[e],
                                empty ? 0.0f : o[b + 1][i] * by[e],
                                empty ? 0.0f : o[b + 1][i + 2] * by[e]};
          store_run(args.partial_o, part + p * C::kLora + b * 64, run, true, true);
        }
      }
    }
  }

  const Args& args;
  const L shared;
  const int group, warp, lane;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COLUMNS_H_
