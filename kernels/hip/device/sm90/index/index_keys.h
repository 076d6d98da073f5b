// Index keys on their way to the registers of index_logits.h: 64 of them a turn for each group of
// four warps, copied to shared memory some turns ahead. There are two ways:
//
//   BulkKeys    A group's keys of a turn lie in one page, so their codes are one bulk copy and
//               their scales another. A warp of its own starts both (BulkFeeder), as soon as the
//               group's warps have read what the place held.
//   LaneKeys    Pages have any size: each lane looks up its own keys and copies its own chunks,
//               which no other lane reads. So they need no barrier.
//
// A product may take any elements of the depth if both operands agree, so four lanes hold 16
// consecutive codes of each half of a key. The policy of the copies makes keys that one query row
// reads leave the L2 before ranks do.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_KEYS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_KEYS_H_

#include "kernels/hip/device/primitives/memory.h"
#include "kernels/hip/device/sm90/index/index_queries.h"
#include "kernels/hip/device/sm90/warpgroup.h"

namespace mla::kernels::hip {

// The positions of a group of warps in a block of index_logits.h, and the place of a lane in them.
struct IndexTurns {
  using L = IndexLayout;
  static constexpr int kStride = L::kKeys * L::kGroups;
  static constexpr int kRows = 2;  // keys of a warp's 16 whose codes a lane shares: 8 apart

  int warp, lane;
  int first, end;  // positions: first of the group's first turn, end of the block
  int turns;

  MLA_DEVICE IndexTurns(int first_of_block, int end_of_block)
      : warp(tile::wave_index()),
        lane(tile::lane_index()),
        first(first_of_block + group() * L::kKeys),
        end(end_of_block),
        turns(first < end ? (end - first + kStride - 1) / kStride : 0) {}

  MLA_DEVICE int group() const { return warp / L::kGroupWarps; }
  MLA_DEVICE int quarter() const { return lane & 3; }
  // Returns a lane's key in its group's turn.
  MLA_DEVICE int key(int i) const { return (warp % L::kGroupWarps) * 16 + i * 8 + (lane >> 2); }
  MLA_DEVICE int position(int turn, int key_of_turn) const {
    return first + turn * kStride + key_of_turn;
  }
};

// Places of keys that BulkFeeder copies, in the order of positions.
struct BulkPlaces {
  using L = IndexLayout;
  using lds_t = tile::lds_t;
  static constexpr int kCount = L::kStages * L::kGroups;
  static constexpr int kCodeBytes = L::kKeys * kIndexDim;
  static constexpr int kScaleBytes = L::kKeys * 4;
  static_assert(kCount * 16 <= L::kBarrierBytes && kScaleBytes <= L::kGroupScaleBytes);

  const L shared{};

  MLA_DEVICE lds_t codes(int place) const { return shared.keys() + place * kCodeBytes; }
  MLA_DEVICE lds_t scales(int place) const { return shared.scales() + place * L::kGroupScaleBytes; }
  MLA_DEVICE lds_t full(int place) const { return shared.barriers() + place * 16; }
  MLA_DEVICE lds_t empty(int place) const { return full(place) + 8; }
};

// Run by the last warp. Its first lane copies all keys of the block.
class BulkFeeder {
 public:
  using L = IndexLayout;

  MLA_DEVICE BulkFeeder(int first_of_block, int end_of_block, const PagedRows& rows,
                        tile::CachePolicy policy)
      : first(first_of_block),
        tiles((end_of_block - first_of_block + L::kKeys - 1) / L::kKeys),
        pages(rows),
        keep(policy) {}

  // Starts the first copies. Other threads may await them after a block barrier.
  MLA_DEVICE void begin() {
    if (tile::lane_index() != 0) return;
    for (int place = 0; place < BulkPlaces::kCount; ++place) {
      tile::barrier_init(places.full(place), 1);
      tile::barrier_init(places.empty(place), L::kGroupWarps);
    }
    tile::barrier_init_visible();
    find(0);
    for (int tile = 0; tile < BulkPlaces::kCount && tile < tiles; ++tile) copy(tile);
  }
  MLA_DEVICE void run() {
    if (tile::lane_index() != 0) return;
#pragma unroll 1
    for (int tile = BulkPlaces::kCount; tile < tiles; ++tile) {
      tile::barrier_wait(places.empty(tile % BulkPlaces::kCount),
                         static_cast<uint32_t>(tile / BulkPlaces::kCount - 1) & 1u);
      copy(tile);
    }
  }

 private:
  MLA_DEVICE void find(int tile) {
    if (tile < tiles) granule = pages.granule(pages.place(first + tile * L::kKeys).page);
  }
  // The last keys of a copy may lie past the end of the sequence; their logits are not used.
  MLA_DEVICE void copy(int tile) {
    const int place = tile % BulkPlaces::kCount;
    const int inside = pages.place(first + tile * L::kKeys).inside;
    const uint8_t* const page = pages.address(granule, 0);
    const tile::lds_t full = places.full(place);
    tile::barrier_arrive_expecting(full, BulkPlaces::kCodeBytes + BulkPlaces::kScaleBytes);
    tile::bulk_copy(places.codes(place), page + inside * kIndexDim, BulkPlaces::kCodeBytes, full,
                    keep);
    tile::bulk_copy(places.scales(place), page + pages.page_size * kIndexDim + inside * 4,
                    BulkPlaces::kScaleBytes, full, keep);
    find(tile + 1);
  }

  const int first, tiles;
  const PagedRows pages;
  const tile::CachePolicy keep;
  const BulkPlaces places{};
  uint32_t granule = 0;  // of the tile that is copied next
};

class BulkKeys {
 public:
  using L = IndexLayout;
  static constexpr bool kFed = true;

  // Returns true if a group's keys of any turn are consecutive bytes.
  MLA_DEVICE static bool serves(const SelectRecord& record) {
    return record.page_size % L::kKeys == 0 && record.row_stride == kIndexDim;
  }
  MLA_DEVICE BulkKeys(const IndexTurns& all, const PagedRows&, tile::CachePolicy) : t(all) {}

  MLA_DEVICE void begin() const {}
  MLA_DEVICE void await(int turn) const {
    tile::barrier_wait(places.full(place(turn)), static_cast<uint32_t>(turn / L::kStages) & 1u);
  }
  // Loads a lane's chunk of half a key.
  MLA_DEVICE Chunk load(int turn, int i, int half) const {
    return tile::load_chunk_shared(places.codes(place(turn)) + t.key(i) * kIndexDim +
                                   half * (kIndexDim / 2) + t.quarter() * 16);
  }
  MLA_DEVICE float scale(int turn) const {
    return tile::load_float(places.scales(place(turn)) + t.key(t.quarter() & 1) * 4);
  }
  // Called when this warp has loaded all that it needs of a turn.
  MLA_DEVICE void release(int turn) const {
    tile::sync_warp();
    if (t.lane == 0) tile::barrier_arrive(places.empty(place(turn)));
  }
  MLA_DEVICE void end() const {}

 private:
  MLA_DEVICE int place(int turn) const { return turn % L::kStages * L::kGroups + t.group(); }

  const BulkPlaces places{};
  const IndexTurns t;
};

class LaneKeys {
 public:
  using L = IndexLayout;
  static constexpr bool kFed = false;
  using lds_t = tile::lds_t;

  MLA_DEVICE LaneKeys(const IndexTurns& all, const PagedRows& rows, tile::CachePolicy policy)
      : t(all), pages(rows), keep(policy) {}

  MLA_DEVICE void begin() {
    for (int turn = 0; turn < kAhead; ++turn) {
      find(turn);
      if (turn < t.turns) copy(turn);
      tile::close_copies();
    }
    find(kAhead);
  }
  MLA_DEVICE void await(int turn) {
    if (turn + kAhead < t.turns) copy(turn + kAhead);
    tile::close_copies();
    find(turn + kAhead + 1);
    tile::wait_for_copies<kAhead>();
  }
  MLA_DEVICE Chunk load(int turn, int i, int half) const {
    return tile::load_chunk_shared(chunk_of(turn, 2 * i + half));
  }
  MLA_DEVICE float scale(int turn) const { return tile::load_float(scale_of(turn)); }
  MLA_DEVICE void release(int) const {}
  MLA_DEVICE void end() const { tile::wait_for_copies<0>(); }

 private:
  static constexpr int kRows = IndexTurns::kRows;
  static constexpr int kAhead = L::kStages - 1;  // turns that keys are copied ahead

  // Returns the position of one of this lane's keys in a turn; positions past the end repeat the
  // last one.
  MLA_DEVICE int position(int turn, int i) const {
    const int at = t.position(turn, t.key(i));
    return at < t.end ? at : t.end - 1;
  }
  MLA_DEVICE void find(int turn) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      granules[i] = pages.granule(pages.place(position(turn, i)).page);
    }
  }
  // Shared-memory address of this lane's chunk, or of its scale, for a turn.
  MLA_DEVICE lds_t chunk_of(int turn, int i) const {
    return shared.keys() + (((turn % L::kStages) * L::kWarps + t.warp) * (2 * kRows) + i) * 512 +
           t.lane * 16;
  }
  MLA_DEVICE lds_t scale_of(int turn) const {
    return shared.scales() + ((turn % L::kStages) * L::kWarps + t.warp) * 128 + t.lane * 4;
  }
  MLA_DEVICE void copy(int turn) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int inside = pages.place(position(turn, i)).inside;
      const uint8_t* const page = pages.address(granules[i], 0);
      const uint8_t* const codes = page + inside * pages.row_stride + t.quarter() * 16;
      tile::copy_chunk(chunk_of(turn, 2 * i), codes, keep);
      tile::copy_chunk(chunk_of(turn, 2 * i + 1), codes + 64, keep);
      if (t.quarter() == i) {
        tile::copy_word(scale_of(turn), page + pages.page_size * pages.row_stride + inside * 4);
      }
    }
  }

  const L shared{};
  const IndexTurns t;
  const PagedRows pages;
  const tile::CachePolicy keep;
  uint32_t granules[kRows] = {};
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INDEX_INDEX_KEYS_H_
