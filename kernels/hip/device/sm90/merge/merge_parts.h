// Merges a tile's parts in the blocks that made them, instead of in a kernel of its own. No kernel
// has to start, and a block has all its arguments already.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PARTS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PARTS_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/sm90/merge/meeting.h"
#include "kernels/hip/device/sm90/merge/split_item.h"

namespace mla::kernels::hip {

// Merges packed rows [share * kRows, ...) of a launch with SplitArgs, by kWarps warps of each block
// of that share. Parts are weighted as in Combine.
//
// A task is a row and 128 of its columns, four a lane. It belongs to 2, 4 or 8 warps of a block,
// which divide the parts among them and add up their sums in shared memory. kOrder is that of the
// parts' columns.
template <int kRows, PartOrder kOrder>
class MergeParts {
 public:
  static constexpr int kWarps = 8;

  // `scratch`: shared memory that nothing else uses after the first barrier.
  MLA_DEVICE MergeParts(const SplitArgs& of, int of_share, tile::lds_t scratch)
      : args(of),
        share(of_share),
        turn_at(scratch),
        sums(scratch + 16),
        lane(tile::lane_index()),
        warp(tile::wave_index()),
        weights(scratch + 16 + kWarps * kSumBytes + warp * (kLaneParts * tile::kWave * 4)) {}

  // `sync`: a barrier of the warps.
  template <class Sync>
  MLA_DEVICE void run(int unit, const Sync& sync) const {
    const auto [first, step] = meet(args.meetings + share, unit, args.pieces, turn_at, sync);
    const int rows = args.packed_rows - share * kRows;
    const int tasks = (rows < kRows ? rows : kRows) * kWindows;
    const int together = tasks <= step ? 8 : tasks <= 2 * step ? 4 : 2;  // warps of a task
    const int at_a_time = kWarps / together;
    for (int task = first * at_a_time; task < tasks; task += step * at_a_time) {
      merge(task + warp % at_a_time, tasks, {warp / at_a_time, together}, sync);
    }
  }

 private:
  static constexpr int kColumns = 512, kWindows = kColumns / 128;
  static constexpr int kLaneParts = kMostSplitPieces / tile::kWave;
  static constexpr int kAhead = 16;  // parts that a warp loads at a time
  static constexpr int kSumBytes = tile::kWave * 16;
  static_assert(kLaneParts * tile::kWave == kMostSplitPieces);

  struct Role {
    int number, warps;  // index of the warp in its task, warps of the task
  };

  template <class Sync>
  MLA_DEVICE void merge(int task, int tasks, const Role& role, const Sync& sync) const {
    const bool mine = task < tasks;
    const int p = share * kRows + (mine ? task / kWindows : 0);
    const int column = task % kWindows * 128 + lane * 4;
    uint32_t x[kAhead][4];
    load(x, role.number, role.warps, p, column);
    float origin;
    const float sum = weigh(p, origin);
    float acc[4] = {};
    for (int first = role.number; first < args.pieces; first += role.warps * kAhead) {
      if (first != role.number) load(x, first, role.warps, p, column);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int part = first + k * role.warps;
        const float w = part < args.pieces ? tile::load_float(weights + part * 4) : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[j] = fma_f(w, bits_to_float(x[k][j]), acc[j]);
      }
    }
    if (role.number > 0) {
      Chunk c;
#pragma unroll
      for (int j = 0; j < 4; ++j) c.w[j] = float_to_bits(acc[j]);
      tile::store_chunk(sums + warp * kSumBytes + lane * 16, c);
    }
    sync();
    if (role.number == 0 && mine) {
      const int apart = kWarps / role.warps;
      for (int w = warp + apart; w < kWarps; w += apart) {
        const Chunk c = tile::load_chunk_shared(sums + w * kSumBytes + lane * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[j] += bits_to_float(c.w[j]);
      }
      const bool empty = sum == 0.0f;
      const float inverse = empty ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[j] *= inverse;
      store(p, column, acc, empty ? negative_infinity() : origin + log2_fast(sum) * kLn2);
    }
    sync();
  }

  // Stores the weights of a row's parts in shared memory, each warp for itself. Returns their sum.
  MLA_DEVICE float weigh(int p, float& origin) const {
    float x[kLaneParts];
    float top = negative_infinity();
#pragma unroll
    for (int k = 0; k < kLaneParts; ++k) {
      const int part = k * tile::kWave + lane;
      const bool exists = part < args.pieces;
      x[k] = exists ? tile::load_fresh(args.partial_lse + part * args.packed_rows + p)
                    : negative_infinity();
    }
#pragma unroll
    for (int k = 0; k < kLaneParts; ++k) top = max_f(top, x[k]);
    top = wave_max(top);
    origin = top == negative_infinity() ? 0.0f : top;  // NaN parts leave it at -inf, but make the
                                                       // sum NaN
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kLaneParts; ++k) {
      const float weight = exp2_fast((x[k] - origin) * kLog2e);
      tile::store_float(weights + (k * tile::kWave + lane) * 4, weight);
      sum += weight;
    }
    tile::sync_warp();
    return wave_sum(sum);
  }

  // Loads values of parts first, first + warps, ...; zeros past the last.
  MLA_DEVICE void load(uint32_t (&x)[kAhead][4], int first, int warps, int p, int column) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int part = first + k * warps;
      if (part < args.pieces) {
        const int64_t row = static_cast<int64_t>(part) * args.packed_rows + p;
        tile::load_fresh(x[k], args.partial_o + row * kColumns + column);
      } else {
        x[k][0] = x[k][1] = x[k][2] = x[k][3] = 0;
      }
    }
  }

  MLA_DEVICE void store(int p, int column, const float (&x)[4], float lse) const {
    const SegmentRecord& r = args.segment;
    const int begin = static_cast<int>(args.heads & 0xffffu);
    const int heads = static_cast<int>(args.heads >> 16) - begin;
    const int64_t q = p / heads, h = begin + p % heads;
    if (column == 0 && r.lse != nullptr) {
      r.lse[q * r.lse_row_stride + h * r.lse_head_stride] = lse;
    }
    const bool f32 = args.o_is_f32 != 0;
    const int bytes = f32 ? 4 : 2;
    void* const o = static_cast<uint8_t*>(r.o) + (q * r.o_row_stride + h * r.o_head_stride) * bytes;
    const bool aligned = aligned_to(o, 0, 0, bytes, 4 * bytes);
    if constexpr (kOrder == PartOrder::kColumns) {
      store_run(o, column, x, f32, aligned);
    } else if constexpr (kOrder == PartOrder::kExchanged) {
      store_exchanged(o, column, x, f32, aligned);
    } else {
      store_paired(o, column, x, f32, aligned);
    }
  }

  const SplitArgs& args;
  const int share;
  const tile::lds_t turn_at, sums;
  const int lane, warp;
  const tile::lds_t weights;  // weights of this warp
};

template <int kRows, PartOrder kOrder, class Sync>
MLA_DEVICE void merge_parts(const SplitArgs& args, const PartOfBlock& part, tile::lds_t scratch,
                            const Sync& sync) {
  MergeParts<kRows, kOrder>(args, part.share, scratch).run(part.unit, sync);
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PARTS_H_
