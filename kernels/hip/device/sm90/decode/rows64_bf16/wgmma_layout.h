// Shared memory of a block of attend_wgmma.h, and the barriers in it.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_LAYOUT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_LAYOUT_H_

#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device/sm90/barriers.h"
#include "kernels/hip/device/sm90/tile.h"
#include "kernels/hip/device/sm90/wgmma.h"

namespace mla::kernels::hip {

// Counts the phases of kBarriers barriers, whose parities the waits need. kPacked: all in one
// register, for kernels that have none left.
template <int kBarriers, bool kPacked>
class Phases {
 public:
  // Counts one more phase of a barrier, and returns the parity of the number before that.
  template <int kBarrier>
  MLA_DEVICE uint32_t next() {
    if constexpr (kPacked) {
      const uint32_t parity = counts[0] >> kBarrier & 1;
      counts[0] ^= 1u << kBarrier;
      return parity;
    } else {
      return counts[kBarrier]++ & 1;
    }
  }
  // Returns what next() returned last.
  template <int kBarrier>
  MLA_DEVICE uint32_t last() const {
    if constexpr (kPacked) {
      return (counts[0] >> kBarrier & 1) ^ 1;
    } else {
      return (counts[kBarrier] - 1) & 1;
    }
  }

 private:
  uint32_t counts[kPacked ? 1 : kBarriers] = {};
};

// Sizes, addresses and barriers. An object holds only the address where the block's shared memory
// begins, so every thread makes its own.
template <class C>
struct WgmmaLayout {
  using lds_t = tile::lds_t;
  static constexpr int kRows = 64;
  static constexpr int kDim = C::kLora + C::kRope;
  static constexpr int kBlocks = C::kLora / 64 + 1;  // column blocks of a tile
  static constexpr bool kRotated = C::kRope > 0;     // the last block is part of the keys
  static constexpr int kBlockBytes = kRows * 128;    // bytes of a block of 64 rows
  static constexpr int kTileBytes = kBlocks * kBlockBytes;
  static constexpr int kHalfBlocks = C::kLora / 128;  // blocks of a group's output columns
  static constexpr int kGroupThreads = 128;
  static constexpr int kGroupWarps = 4;
  static constexpr int kParts = 4;  // parts of a tile, with a barrier each, so that scores start
                                    // early
  static constexpr int kPartBlocks = 2;  // column blocks of a part, without the rotated one
  static_assert(C::kTileKv == kRows && C::kLora == 512 && (C::kRope == 64 || C::kRope == 0));
  // Rows of 8 bits pass through a staging area and are widened when they are written to a slot.
  static constexpr bool kWidens = C::kFormat != KvFormat::kBf16;
  // A column block of bf16 in such rows is copied to slot s as a piece of part direct_part(s).
  static constexpr bool kDirect =
      C::kFormat == KvFormat::kFp8Row || C::kFormat == KvFormat::kFp8Page;
  static constexpr int direct_part(int s) {
    return C::kFormat == KvFormat::kFp8Page && s == 1 ? kParts / 2 - 1 : kParts - 1;
  }
  // Items have one query row, which may not see all of its places.
  static constexpr bool kLists = C::kAttention != AttentionKind::kDense;

  static constexpr int kOriginBytes = 2 * kRows * 4;
  static constexpr int kSumBytes = 2 * 2 * kRows * 8;
  static constexpr int kBarriers = 3 * kParts + 2 * 2 + 2 + 2 + 2;
  static constexpr int kBarrierBytes = (kBarriers * 8 + 127) / 128 * 128;
  // Queries without a rotated part leave the room of their last block to the staging area.
  static constexpr int kQueryBytes = kTileBytes - (kRotated ? 0 : kBlockBytes);
  static constexpr int kStages = kRotated ? 4 : 7;  // stages of staging, a chunk a thread
  static constexpr int kStagingBytes = kWidens ? kStages * kGroupThreads * 16 : 0;
  static constexpr int kSeenBytes = kLists ? 2 * kRows / 8 * 4 : 0;
  static constexpr int kSharedBytes = 2 * kTileBytes + kQueryBytes + kOriginBytes + kSumBytes +
                                      kBarrierBytes + kStagingBytes + kSeenBytes;

  // Additional bytes in kernels of streams, after all others.
  static constexpr int kStreamBytes = 16;

  lds_t base;

  MLA_DEVICE lds_t turn() const { return base + kSharedBytes; }  // turn of MergePieces
  // Returns the place of the block's start: the low half of realtime_ns.
  MLA_DEVICE lds_t begun() const { return turn() + 8; }

  MLA_DEVICE lds_t slot(int s) const { return base + s * kTileBytes; }
  MLA_DEVICE lds_t queries() const { return slot(2); }
  MLA_DEVICE lds_t probabilities(int s) const { return slot(s) + (kBlocks - 1) * kBlockBytes; }
  MLA_DEVICE lds_t origin(int group, int row) const {
    return queries() + kQueryBytes + (group * kRows + row) * 4;
  }
  // Returns the place of a row's two sums. Items alternate between two sets, because a group may be
  // one item ahead.
  MLA_DEVICE lds_t sums(uint32_t set, int group, int row) const {
    return origin(2, 0) + ((set * 2 + group) * kRows + row) * 8;
  }
  MLA_DEVICE lds_t staging() const { return base + kSharedBytes - kSeenBytes - kStagingBytes; }
  // Returns the place of the word that says which of eight rows of a slot's tile the query row
  // sees, four bits a row.
  MLA_DEVICE lds_t seen(int s, int eight) const {
    return base + kSharedBytes - kSeenBytes + (s * kRows / 8 + eight) * 4;
  }
  MLA_DEVICE lds_t barrier(int i) const { return origin(2, 0) + kSumBytes + i * 8; }
  // filled: a part of a slot's tile has arrived. emptied: group `half` has finished with its
  // columns. scored: a slot's scores are computed. published: its probabilities are stored. summed:
  // both groups' sums of an item are stored. Queries have the barriers of a third slot.
  MLA_DEVICE lds_t filled(int s, int part) const { return barrier(s * kParts + part); }
  MLA_DEVICE lds_t queries_filled(int part) const { return filled(2, part); }
  MLA_DEVICE lds_t emptied(int s, int half) const { return barrier(3 * kParts + s * 2 + half); }
  MLA_DEVICE lds_t scored(int s) const { return barrier(3 * kParts + 4 + s); }
  MLA_DEVICE lds_t published(int s) const { return barrier(3 * kParts + 6 + s); }
  MLA_DEVICE lds_t summed() const { return barrier(kBarriers - 2); }
  MLA_DEVICE lds_t queries_emptied() const { return barrier(kBarriers - 1); }

  // Arrivals that fill a part of a tile, and one of the queries. Each warp that widens writes a
  // part in two halves.
  static constexpr int kTileArrivals = kWidens ? 2 * kGroupWarps : kGroupThreads;
  static constexpr int kQueryArrivals = kGroupThreads;
  MLA_DEVICE void init_barriers(int bringing = kTileArrivals, int asking = kQueryArrivals) const {
    if (thread_index() == 0) {
      for (int part = 0; part < kParts; ++part) {
        // The first part includes the bits of seen list rows.
        const int more = kLists && !kWidens && part == 0 ? kGroupWarps : 0;
        for (int s = 0; s < 2; ++s) {
          const int copies = kDirect && part == direct_part(s) ? 2 * kGroupThreads : 0;
          tile::barrier_init(filled(s, part), bringing + more + copies);
        }
        tile::barrier_init(queries_filled(part), asking);
      }
      for (int s = 0; s < 2; ++s) {
        // The group that owns a tile may read values by thread; the other group never does.
        tile::barrier_init(emptied(s, s), kGroupThreads);
        tile::barrier_init(emptied(s, 1 - s), kGroupWarps);
        tile::barrier_init(scored(s), kGroupWarps);
        tile::barrier_init(published(s), kGroupThreads);
      }
      tile::barrier_init(summed(), 2 * kGroupThreads);
      tile::barrier_init(queries_emptied(), 2 * kGroupWarps);
      tile::publish_shared();
    }
    block_barrier();
  }
  // Returns how many column blocks a part has; the rotated one comes with the last part.
  MLA_DEVICE static constexpr int part_blocks(int part) {
    return kRotated && part == kParts - 1 ? kPartBlocks + 1 : kPartBlocks;
  }
  // Returns column block `i` (0 to kBlocks - 1) of slot s in the order of copies and scores. The
  // half that group s releases first comes first, because it is refilled first.
  MLA_DEVICE static constexpr int block(int s, int i) {
    return i == kBlocks - 1 ? i : s == 0 ? i : (i + kHalfBlocks) % (2 * kHalfBlocks);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_BF16_WGMMA_LAYOUT_H_
