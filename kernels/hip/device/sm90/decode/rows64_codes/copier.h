// The copying group of attend_e4m3.h and attend_rows.h.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COPIER_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COPIER_H_

#include "kernels/hip/device/kv/row_finder.h"
#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

// Copies the KV rows of one item after the other, 64 keys a slot. A warp takes 16 rows, eight lanes
// a row. One lane finds a row (RowFinder).
//
// It also converts scales of fp8_row to the forms that scorers and summing groups use; rows are not
// changed. Copies of up to kBehind tiles run ahead of the conversion, if slots are free. Where
// items have few tiles, the scorers convert them instead (converts): the first tile is then not
// held up by the issue of later copies.
//
// L: the layout of shared memory.
template <class C, class L, class Args = AttendArgs>
class E4m3Copier {
 public:
  using lds_t = tile::lds_t;
  using Source = RowSource<C::kAttention>;
  // Arrivals at L::filled. The bits of seen list rows are ordinary stores, not copies, so each warp
  // of a kernel for lists arrives for them itself.
  static constexpr int kArrivals =
      L::kGroupThreads + (L::kLists && !L::kScaledRows ? L::kGroupWarps : 0);

  MLA_DEVICE E4m3Copier(const Args& a, const L& layout)
      : args(a), shared(layout), warp(tile::wave_index() & 3), lane(tile::lane_index()) {}

  MLA_DEVICE void copy(const Item& item) {
    const Source source(args, item);
    if (source.begin >= source.end) return;
    // Hidden from the compiler, which would keep the row's number over all items.
    const auto of_lane = static_cast<int>(tile::unknown(static_cast<uint32_t>(lane)));
    RowFinder<Source, C::kTileKv> finder(source,
                                         source.begin + warp * kRows + (of_lane & (kRows - 1)));
    for (int left = source.end - source.begin; left > 0; left -= C::kTileKv) {
      wait_emptied();
      if constexpr (L::kLists) write_seen(ring.slot, finder.sees());
      const uint8_t* const row = finder.row(source);
      finder.next(source);
      copy_tile(ring.slot, row);
      hand_over();
      ring.next();
    }
    finish_all();
  }

  // Returns true if the copying group converts scales. With boxes it always does (CodeBoxCopier).
  MLA_DEVICE static bool converts(const Args& args) {
    if constexpr (Args::kBoxes) {
      return true;
    } else if constexpr (!kMayConvert) {
      return false;
    } else if constexpr (L::kLists) {
      return true;
    } else {
      return args.few_tiles == 0;
    }
  }

 private:
  static constexpr int kRows = 16;     // rows of a tile, a warp
  static constexpr int kLaneRows = 4;  // rows of a tile that a lane copies chunks of
  static constexpr int kBehind = 2;    // tiles
  static constexpr bool kMayConvert = L::kScaledRows && !Args::kSplit;
  static_assert(4 * kRows == L::kKeys);

  // Returns the index of this lane's i-th row.
  MLA_DEVICE static int row_lane(int i, int lane) { return i * 4 + (lane >> 3); }
  MLA_DEVICE int row(int i) const { return warp * kRows + row_lane(i, lane); }

  MLA_DEVICE void copy_tile(int slot, const uint8_t* mine) const {
    const int place = lane & 7;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const uint8_t* const from = row_from_lane(mine, row_lane(i, lane));
      const int target_row = row(i), chunk = place ^ tile::swizzle(target_row);
#pragma unroll
      for (int block = 0; block < L::kBlocks; ++block) {
        tile::copy_chunk(shared.slot(slot) + block * L::kBlockBytes + target_row * 128 + place * 16,
                         from + block * 128 + chunk * 16);
      }
      if constexpr (L::kScaledRows) {
        tile::copy_chunk(shared.rope(slot) + target_row * 128 + place * 16,
                         from + C::kLora + 16 + chunk * 16);
        if (place == i)
          tile::copy_chunk(shared.raw_scales(slot) + target_row * 16, from + C::kLora);
      } else if (place >> 2 == (i & 1)) {
        // Four chunks a row: each half of a row's eight lanes takes every second row.
        const int narrow = place & 3;
        tile::copy_chunk(shared.rope(slot) + target_row * 64 + narrow * 16,
                         from + C::kLora + (narrow ^ narrow_swizzle(target_row)) * 16);
      }
    }
  }

  // Stores bit k if the query row sees key k of this warp's rows.
  MLA_DEVICE void write_seen(int slot, bool seen) const {
    const uint32_t word = tile::ballot(seen) & 0xffffu;
    if (lane == 0) {
      tile::store_half_word(shared.seen(slot) + warp * 2, word);
      if (!L::kScaledRows) tile::barrier_arrive(shared.filled(slot));
    }
  }

  // Lets the scorers wait for the tile that is being copied, or finishes an earlier one for them.
  MLA_DEVICE void hand_over() {
    if constexpr (kMayConvert) {
      if (converts(args)) {
        tile::close_copies();
        if (++open > kBehind) finish<kBehind>();
        return;
      }
    }
    tile::barrier_arrive_after_copies(shared.filled(ring.slot));
  }

  // Waits until the next slot is free. It may become free only after copied tiles are finished.
  MLA_DEVICE void wait_emptied() {
    const lds_t barrier = shared.emptied(ring.slot);
    if (converts(args) && !tile::any(tile::barrier_ended(barrier, ring.parity ^ 1))) finish_all();
    tile::barrier_wait(barrier, ring.parity ^ 1);
  }
  MLA_DEVICE void finish_all() {
    if constexpr (kMayConvert) {
      static_assert(kBehind == 2);
      if (open > 1) finish<1>();
      if (open > 0) finish<0>();
    }
  }
  // Finishes the oldest copied tile; kYounger tiles remain in flight.
  template <int kYounger>
  MLA_DEVICE void finish() {
    --open;
    tile::wait_for_copies<kYounger>();
    tile::sync_warp();
    shared.convert_scales(finished.slot, warp, lane);
    tile::publish_shared();
    tile::barrier_arrive(shared.filled(finished.slot));
    finished.next();
  }

  const Args& args;
  const L shared;
  const int warp, lane;
  Ring<L::kSlots> ring, finished;
  int open = 0;  // if this group converts: tiles copied or in flight, and not finished
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_COPIER_H_
