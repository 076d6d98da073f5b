// Places in the shared memory of a block of attend_fp8.h, and the barriers between its groups.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_LAYOUT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_LAYOUT_H_

#include "kernels/hip/device/kv/row_source.h"
#include "kernels/hip/device/sm90/barriers.h"
#include "kernels/hip/device/sm90/fp8_instructions.h"
#include "kernels/hip/device/sm90/tile.h"

namespace mla::kernels::hip {

// Chunk c of a row of 64 bytes lies at position c ^ narrow_swizzle(row).
constexpr int narrow_swizzle(int row) { return row >> 1 & 3; }

// An object holds only the address where the block's shared memory begins, so every thread makes
// its own.
//
//   queries        blocks of 64 columns [kRows x 64], binary16 in the order of query_place; for
//                  fp8_row the rotated columns are bf16
//   a slot         64 keys: blocks of 128 columns [64 x 128 e4m3]; rotated part [64 x 64 e4m3], or
//                  [64 x 64 bf16] and [64 x 4] scales
//   probabilities  of a group's tile: [kRows x 64 keys] binary16, each eight keys in the order
//                  of key_of_row
template <class C>
struct Fp8Layout {
  using lds_t = tile::lds_t;
  static constexpr bool kScaledRows = C::kFormat == kernels::KvFormat::kFp8Row;
  static constexpr bool kLists = C::kAttention == AttentionKind::kSparse;
  static constexpr int kRows = C::kRows;  // packed rows
  static constexpr int kKeys = C::kTileKv;
  static constexpr int kSlots = C::kStages;
  static constexpr int kQueryBlockBytes = kRows * 128;
  static constexpr int kQueryBytes = (C::kLora + C::kRope) / 64 * kQueryBlockBytes;
  static constexpr int kLatentBytes = kKeys * C::kLora;
  static constexpr int kRopeBytes = kKeys * (kScaledRows ? 128 : 64);
  static constexpr int kSlotBytes = kLatentBytes + kRopeBytes + (kScaledRows ? kKeys * 16 : 0);
  static constexpr int kProbabilityBytes = kRows * 128;
  // Scales of a tile's keys as binary16, by groups of columns.
  static constexpr int kScaleGroups = C::kLora / 128;
  static constexpr int kScaleBytes = kScaledRows ? kScaleGroups * kKeys * 2 : 0;
  // By packed row: scale of the queries, origin, factors of two tiles, and maxima and sums of 8
  // warps.
  static constexpr int kStatBytes = kRows * 4;
  static constexpr int kStats = 1 + 1 + 2 + 8 + 8;
  static constexpr int kBarriers = 2 * kSlots + 6;
  static constexpr int kSharedBytes = kQueryBytes + kSlots * kSlotBytes + 2 * kProbabilityBytes +
                                      2 * kScaleBytes + kStats * kStatBytes + 16 + 128;
  static_assert(kKeys == 64 && C::kLora == 512 && C::kRope == 64);
  static_assert(kSlotBytes % 1024 == 0 && kProbabilityBytes % 1024 == 0 && kBarriers * 8 <= 128);

  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = 4;
  static constexpr int kScoreWarps = 2 * kGroupWarps, kValueWarps = 2 * kGroupWarps;

  lds_t base;

  MLA_DEVICE lds_t queries() const { return base; }
  MLA_DEVICE lds_t slot(int s) const { return base + kQueryBytes + s * kSlotBytes; }
  MLA_DEVICE lds_t rope(int s) const { return slot(s) + kLatentBytes; }
  MLA_DEVICE lds_t raw_scales(int s) const { return rope(s) + kRopeBytes; }
  MLA_DEVICE lds_t probabilities(int group) const {
    return slot(kSlots) + group * kProbabilityBytes;
  }
  MLA_DEVICE lds_t scales(int group, int columns) const {
    return probabilities(2) + group * kScaleBytes + columns * (kKeys * 2);
  }
  MLA_DEVICE lds_t stats(int i) const {
    return probabilities(2) + 2 * kScaleBytes + i * kStatBytes;
  }
  MLA_DEVICE lds_t query_scale() const { return stats(0); }
  MLA_DEVICE lds_t origin() const { return stats(1); }
  MLA_DEVICE lds_t factor(int group) const { return stats(2 + group); }
  MLA_DEVICE lds_t maxima(int warp) const { return stats(4 + warp); }
  MLA_DEVICE lds_t sums(int warp) const { return stats(12 + warp); }
  // Returns the place of a word for each group: nonzero if its tile has moved origins.
  MLA_DEVICE lds_t moved(int group) const { return stats(kStats) + group * 4; }
  MLA_DEVICE lds_t barrier(int i) const { return stats(kStats) + 16 + i * 8; }
  // filled: a slot's keys have arrived. emptied: they are no longer needed.
  MLA_DEVICE lds_t filled(int s) const { return barrier(s); }
  MLA_DEVICE lds_t emptied(int s) const { return barrier(kSlots + s); }
  // published: the probabilities of a group's tile are stored. adopted: they are no longer needed.
  MLA_DEVICE lds_t published(int group) const { return barrier(2 * kSlots + group); }
  MLA_DEVICE lds_t adopted(int group) const { return barrier(2 * kSlots + 2 + group); }
  // summed: the sums of an item are stored. taken: statistics of its rows are no longer needed.
  MLA_DEVICE lds_t summed() const { return barrier(2 * kSlots + 4); }
  MLA_DEVICE lds_t taken() const { return barrier(2 * kSlots + 5); }

  MLA_DEVICE void init_barriers() const {
    if (thread_index() == 0) {
      for (int s = 0; s < kSlots; ++s) {
        tile::barrier_init(filled(s), kGroupThreads);
        tile::barrier_init(emptied(s), kGroupWarps + kValueWarps);
      }
      for (int group = 0; group < 2; ++group) {
        tile::barrier_init(published(group), kGroupThreads);
        tile::barrier_init(adopted(group), kValueWarps);
      }
      tile::barrier_init(summed(), kScoreWarps * tile::kWave);
      tile::barrier_init(taken(), kValueWarps * tile::kWave);
      tile::publish_shared();
    }
    block_barrier();
  }
};

// Returns the number of KV tiles of an item.
template <class C>
MLA_DEVICE int fp8_tiles(const RowSource<C::kAttention>& source) {
  return (source.end - source.begin + C::kTileKv - 1) / C::kTileKv;
}

// A place of a ring of kCount and the parity of its current use.
template <int kCount>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  MLA_DEVICE void next() {
    if (++slot < kCount) return;
    slot = 0;
    parity ^= 1;
  }
};

// Row `row` of eight of an operand is this key of eight. Rows that lanes read at the same time then
// differ in the bit that selects the bank.
constexpr int key_of_row(int row) { return (row >> 1) + 4 * (row & 1); }

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS16_FP8_LAYOUT_H_
