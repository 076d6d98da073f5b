// The copying group of attend_wgmma.h for rows that lie in boxes of a tensor map.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PRODUCER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PRODUCER_H_

#include "kernels/hip/device/kv/row_finder.h"
#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/boxes/box_place.h"
#include "kernels/hip/device/sm90/decode/rows64_bf16/wgmma_layout.h"
#include "kernels/hip/device/sm90/warpgroup.h"

namespace mla::kernels::hip {

// Warp 0 asks the copy engine for KV rows, a lane for each box of a tile; the other warps copy
// queries by 16 bytes a lane. So the first rows of an item do not wait for its queries.
template <class C>
class BoxProducer {
 public:
  using L = WgmmaLayout<C>;
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;
  static_assert(C::kFormat == KvFormat::kBf16 && !L::kLists && C::kTileKv == kMostBoxRows);
  static_assert(L::kDim * 2 == kBf16RowBytes && L::kBlocks * kBoxColumns == L::kDim);
  static constexpr int kRegisters = 40;  // of a thread
  static constexpr int kQueryWarps = L::kGroupWarps - 1;
  static constexpr int kTileArrivals = 1, kQueryArrivals = kQueryWarps * 32;

  MLA_DEVICE BoxProducer(const BoxArgs& a, const L& layout)
      : args(a),
        shared(layout),
        lane(tile::lane_index()),
        warp(tile::wave_index() & 3),
        policy(tile::cache_policy(false)) {
    if (warp == 0 && lane == 0) tile::prefetch_map(args.rows);
  }

  MLA_DEVICE void produce(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    if (warp == 0) {
      copy_rows(source);
    } else {
      copy_queries(item);
    }
  }

 private:
  static constexpr int kWarpRows = 4;  // neighbouring rows that a warp copies at a time
  static constexpr int kFours = L::kRows / kWarpRows;
  static constexpr int kCopyFours = (kFours + kQueryWarps - 1) / kQueryWarps;

  MLA_DEVICE BoxPlace find(const Source& source, int first) const {
    return find_box(source, args.box_rows, first, lane);
  }
  MLA_DEVICE void copy_rows(const Source& source) {
    BoxPlace box = find(source, source.begin);
    for (int first = source.begin; first < source.end; first += 2 * C::kTileKv) {
      copy_tile<0>(box);
      const int second = first + C::kTileKv;
      if (second >= source.end) break;
      box = find(source, second);
      copy_tile<1>(box);
      box = find(source, second + C::kTileKv);
    }
  }
  template <int kSlot>
  MLA_DEVICE void copy_tile(const BoxPlace& box) {
    const uint32_t n = used[kSlot]++;
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      if (part % 2 == 0 && n > 0) {
        tile::barrier_wait(shared.emptied(kSlot, part / 2 ^ kSlot), (n - 1) & 1);
      }
      const lds_t filled = shared.filled(kSlot, part);
      if (lane == 0) {
        tile::barrier_arrive_expecting(
            filled, static_cast<uint32_t>(L::part_blocks(part) * L::kBlockBytes));
      }
      if (lane * args.box_rows < L::kRows) {
        const lds_t target =
            shared.slot(kSlot) + static_cast<uint32_t>(lane * args.box_rows * kBoxColumns * 2);
#pragma unroll
        for (int i = 0; i < L::part_blocks(part); ++i) {
          const int block = L::block(kSlot, L::kPartBlocks * part + i);
          tile::box_copy(target + block * L::kBlockBytes, args.rows, block * kBoxColumns, box.row,
                         box.granule, filled, policy);
        }
      }
    }
  }

  // Eight lanes copy a row of the queries, part by part.
  MLA_DEVICE void copy_queries(const Item& item) {
    const uint32_t n = items++;
    if (n > 0) tile::barrier_wait(shared.queries_emptied(), (n - 1) & 1);
    const QueryLoader queries(item);
    if (!queries.aligned) {
      copy_unaligned(queries);
#pragma unroll
      for (int part = 0; part < L::kParts; ++part) {
        tile::barrier_arrive(shared.queries_filled(part));
      }
      return;
    }
    // Lanes find a row each and hand it to the eight that copy it, which saves registers.
    const int mine = row(lane >> 2, lane & 3);
    const auto* const query =
        reinterpret_cast<const uint8_t*>(queries.row(mine < L::kRows ? mine : 0));
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kCopyFours; ++i) copy_four(query, i, part);
      tile::barrier_arrive_after_copies(shared.queries_filled(part));
    }
  }
  // Copies a word at a time: this is rare, and the whole chunks of QueryLoader::copy_tile take so
  // many registers that the kernel spills (132 bytes).
  MLA_DEVICE void copy_unaligned(const QueryLoader& queries) const {
#pragma unroll 1
    for (int p = warp - 1; p < L::kRows; p += kQueryWarps) {
      const auto* const from = as_global<const uint16_t>(queries.row(p));
#pragma unroll 1
      for (int w = lane; w < L::kDim / 2; w += tile::kWave) {
        const uint32_t word = from[2 * w] | static_cast<uint32_t>(from[2 * w + 1]) << 16;
        tile::store_word(tile::chunk_at<L::kRows>(shared.queries(), p, w >> 2) + (w & 3) * 4, word);
      }
    }
  }
  // Copies the column blocks of a part of four rows.
  MLA_DEVICE void copy_four(const uint8_t* found, int i, int part) const {
    const uint8_t* const from = row_from_lane(found, i * kWarpRows + (lane >> 3));
    const int p = row(i, lane >> 3);
    if (p >= L::kRows) return;
    const int chunk = (lane & 7) ^ tile::swizzle(p);
    const lds_t target = shared.queries() + p * 128 + (lane & 7) * 16;
#pragma unroll
    for (int b = 0; b < L::part_blocks(part); ++b) {
      const int block = L::block(0, L::kPartBlocks * part + b);
      tile::copy_chunk(target + block * L::kBlockBytes, from + block * 128 + chunk * 16);
    }
  }
  // Returns row `of_four` of the warp's four i; past the tile there may be none.
  MLA_DEVICE int row(int i, int of_four) const {
    return (i * kQueryWarps + warp - 1) * kWarpRows + of_four;
  }

  const BoxArgs& args;
  const L shared;
  const int lane, warp;
  // The blocks that run at a time read the same rows at nearly the same time, and most launches
  // read no row again, so rows leave the L2 to queries and partial results.
  const tile::CachePolicy policy;
  uint32_t used[2] = {0, 0};
  uint32_t items = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_BOX_PRODUCER_H_
