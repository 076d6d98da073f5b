// The copying group of attend_e4m3.h and attend_rows.h for rows that lie in boxes of tensor maps.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_CODE_BOX_COPIER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_CODE_BOX_COPIER_H_

#include "kernels/hip/device/primitives/query_loader.h"
#include "kernels/hip/device/sm90/decode/boxes/box_place.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/warpgroup.h"

namespace mla::kernels::hip {

// Warp 0 asks the copy engine for KV rows, a lane for each box of a tile, and brings queries to the
// L2 (prefetch_queries). Over fp8_row two more warps convert the scales of keys
// (E4m3RowsLayout::convert_scales) once a tile has arrived.
//
// L: the layout of shared memory.
template <class C, class L>
class CodeBoxCopier {
 public:
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;
  static_assert(!L::kLists && L::kKeys == kMostBoxRows);
  static constexpr int kConverters = L::kScaledRows ? 2 : 0;          // warps
  static constexpr int kArrivals = L::kScaledRows ? kConverters : 1;  // at L::filled

  MLA_DEVICE CodeBoxCopier(const BoxArgs& a, const L& layout)
      : args(a),
        shared(layout),
        lane(tile::lane_index()),
        warp(tile::wave_index() & 3),
        policy(tile::cache_policy(false)) {
    if (warp == 0 && lane == 0) {
      tile::prefetch_map(args.rows);
      tile::prefetch_map(args.narrow);
    }
  }

  MLA_DEVICE void copy(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    if (warp == 0) {
      copy_rows(source, item);
    } else if (warp <= kConverters) {
      convert_scales(source);
    }
  }

 private:
  // Columns of the maps. A row has its codes, then over fp8_row its scales, then the rotated part.
  static constexpr int kCodeColumns = C::kLora / 2;
  static constexpr int kScaleColumns = NarrowColumns(KvFormat::kFp8Row);
  static constexpr int kTileBytes = L::kSlotBytes;

  MLA_DEVICE void copy_rows(const Source& source, const Item& item) {
    BoxPlace box = find_box(source, args.box_rows, source.begin, lane);
    for (int first = source.begin; first < source.end; first += C::kTileKv) {
      tile::barrier_wait(shared.emptied(ring.slot), ring.parity ^ 1);
      copy_tile(ring.slot, box);
      if (first == source.begin && begun) prefetch_queries(item);
      box = find_box(source, args.box_rows, first + C::kTileKv, lane);
      ring.next();
    }
    begun = true;
  }
  // Brings the item's queries to the L2, before the scorers have finished the previous item and
  // load them. The first item of a block needs no call, because the scorers load its queries at
  // once.
  MLA_DEVICE void prefetch_queries(const Item& item) const {
    constexpr int kRowBytes = (C::kLora + C::kRope) * 2, kLine = 128;
    const QueryLoader queries(item);
#pragma unroll 1
    for (int p = lane; p < item.rows; p += tile::kWave) {
      const auto* const row = reinterpret_cast<const uint8_t*>(queries.row(p));
#pragma unroll
      for (int at = 0; at < kRowBytes; at += kLine) tile::prefetch(row + at);
    }
  }
  MLA_DEVICE lds_t arrived(int slot) const {
    if constexpr (L::kScaledRows) {
      return shared.arrived(slot);
    } else {
      return shared.filled(slot);
    }
  }
  MLA_DEVICE void copy_tile(int slot, const BoxPlace& box) const {
    const lds_t barrier = arrived(slot);
    if (lane == 0) tile::barrier_arrive_expecting(barrier, kTileBytes);
    const int first = lane * args.box_rows;
    if (first >= L::kKeys) return;
#pragma unroll
    for (int block = 0; block < L::kBlocks; ++block) {
      copy(shared.slot(slot) + block * L::kBlockBytes + first * 128, args.rows, block * kBoxColumns,
           box, barrier);
    }
    if constexpr (L::kScaledRows) {
      copy(shared.rope(slot) + first * 128, args.rows, kCodeColumns + kScaleColumns, box, barrier);
      copy(shared.raw_scales(slot) + first * 16, args.narrow, kCodeColumns, box, barrier);
    } else {
      copy(shared.rope(slot) + first * 64, args.narrow, kCodeColumns, box, barrier);
    }
  }
  MLA_DEVICE void copy(lds_t to, const TensorMap& map, int column, const BoxPlace& box,
                       lds_t barrier) const {
    tile::box_copy(to, map, column, box.row, box.granule, barrier, policy);
  }

  MLA_DEVICE void convert_scales(const Source& source) {
    if constexpr (L::kScaledRows) {
      constexpr int kQuarters = L::kGroupWarps / kConverters;  // of a tile, a warp
      for (int left = source.end - source.begin; left > 0; left -= C::kTileKv) {
        tile::barrier_wait(shared.arrived(ring.slot), ring.parity);
#pragma unroll
        for (int i = 0; i < kQuarters; ++i) {
          shared.convert_scales(ring.slot, (warp - 1) * kQuarters + i, lane);
        }
        tile::publish_shared();
        tile::sync_warp();
        if (lane == 0) tile::barrier_arrive(shared.filled(ring.slot));
        ring.next();
      }
    }
  }

  const BoxArgs& args;
  const L shared;
  const int lane, warp;
  const tile::CachePolicy policy;  // as BoxProducer's
  Ring<L::kSlots> ring;
  bool begun = false;  // this is not the block's first item
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_BOXES_CODE_BOX_COPIER_H_
