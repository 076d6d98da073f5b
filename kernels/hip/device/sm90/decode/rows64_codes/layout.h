// Places in the shared memory of a block of attend_e4m3.h, and the barriers between its groups.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_LAYOUT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_LAYOUT_H_

#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

// An object holds only the address where the block's shared memory begins, so every thread makes
// its own. The block computes one item after the other. An item has up to 64 packed rows (rows of
// queries times heads) and any number of keys, which pass through kSlots slots in tiles of 64.
// In shared memory lie, one after the other:
//
//   queries         64 packed rows: four blocks of 128 columns [64 x 128 e4m3], and the rotated
//                   part [64 x 64 e4m3]
//   slots           64 keys each, arranged as the queries are
//   probabilities   for each slot [64 packed rows x 64 keys] e4m3; every 16 keys are in the order
//                   that columns.h gives
//   ones            an operand of ones, by which the scorers sum probabilities
//   seen            for each slot, with index lists only: a bit a key
//   stats           arrays of one fp32 number for each packed row
//   moved           for each slot: one word a scorer warp
//   barriers        of 8 bytes
//
// The copying group fills slots, the scorers (group 0) turn a slot into probabilities, and the two
// groups of values (E4m3Values) sum the slot's rows by these. Each barrier hands one of these
// places from a group that has written it to a group that reads it, or back when it has been read.
template <class C>
struct E4m3Layout {
  using lds_t = tile::lds_t;
  static constexpr bool kScaledRows = false;
  static_assert(C::kFormat == KvFormat::kFp8Tensor);
  static constexpr bool kLists = C::kAttention == AttentionKind::kSparse;
  static constexpr int kRows = 64;  // packed rows
  static constexpr int kKeys = C::kTileKv;
  static constexpr int kSlots = C::kStages;
  static constexpr int kBlocks = C::kLora / 128;
  static constexpr int kBlockBytes = kRows * 128;
  static constexpr int kLatentBytes = kBlocks * kBlockBytes;
  static constexpr int kRopeBytes = kRows * 64;
  static constexpr int kQueryBytes = kLatentBytes + kRopeBytes;
  static constexpr int kSlotBytes = kQueryBytes;
  static constexpr int kProbabilityBytes = kRows * kKeys;
  // Bytes a slot: bit i is set if the queries see key i of the tile.
  static constexpr int kSeenBytes = kLists ? kKeys / 8 : 0;
  // Bytes of one array of stats. There are query_scale, result_scale, and for each slot factor and
  // old_factor.
  static constexpr int kStatBytes = kRows * 4;
  static constexpr int kStats = 2 + 2 * kSlots;
  static constexpr int kBarriers = 4 * kSlots + 2;
  static constexpr int kMovedBytes = 16, kOnesBytes = 1024;
  static constexpr int kSharedBytes =
      kQueryBytes + kSlots * (kSlotBytes + kProbabilityBytes + kSeenBytes + kMovedBytes) +
      kOnesBytes + kStats * kStatBytes + (kBarriers * 8 + 127) / 128 * 128;
  static_assert(kKeys == 64 && C::kLora == 512 && C::kRope == 64);
  static_assert(kSlotBytes % 1024 == 0 && kQueryBytes % 1024 == 0);

  static constexpr int kGroupThreads = 128, kThreads = 4 * kGroupThreads;
  static constexpr int kGroupWarps = 4;
  static constexpr int kValueWarps = 2 * kGroupWarps;

  lds_t base;

  MLA_DEVICE lds_t queries() const { return base; }
  MLA_DEVICE lds_t slot(int s) const { return base + kQueryBytes + s * kSlotBytes; }
  MLA_DEVICE lds_t rope(int s) const { return slot(s) + kLatentBytes; }
  MLA_DEVICE lds_t probabilities(int s) const { return slot(kSlots) + s * kProbabilityBytes; }
  // Ones [8 x 128 e4m3].
  MLA_DEVICE lds_t ones() const { return probabilities(kSlots); }
  MLA_DEVICE lds_t seen(int s) const { return ones() + kOnesBytes + s * kSeenBytes; }
  MLA_DEVICE lds_t stats(int i) const { return seen(kSlots) + i * kStatBytes; }
  // A product of a query and a key times query_scale is a logit of base 2. A sum of values times
  // result_scale is an output.
  MLA_DEVICE lds_t query_scale() const { return stats(0); }
  MLA_DEVICE lds_t result_scale() const { return stats(1); }
  // The sum over all tiles so far becomes old sum * old_factor + sum over this tile * factor.
  MLA_DEVICE lds_t factor(int s) const { return stats(2 + s); }
  MLA_DEVICE lds_t old_factor(int s) const { return stats(2 + kSlots + s); }
  // Returns the place of one word for each of the four scorer warps: nonzero if the old factor of
  // one of its 16 rows is not 1. If all are zero, the groups of values do not rescale their old
  // sums.
  MLA_DEVICE lds_t moved(int s) const { return stats(kStats) + s * kMovedBytes; }
  MLA_DEVICE lds_t barrier(int i) const { return moved(kSlots) + i * 8; }
  // filled: a slot's keys have arrived. emptied: they are no longer needed.
  MLA_DEVICE lds_t filled(int s) const { return barrier(s); }
  MLA_DEVICE lds_t emptied(int s) const { return barrier(kSlots + s); }
  // published: the probabilities of a slot's tile are stored. adopted: they are no longer needed.
  MLA_DEVICE lds_t published(int s) const { return barrier(2 * kSlots + s); }
  MLA_DEVICE lds_t adopted(int s) const { return barrier(3 * kSlots + s); }
  // summed: scales of an item's results are stored. taken: they are no longer needed.
  MLA_DEVICE lds_t summed() const { return barrier(4 * kSlots); }
  MLA_DEVICE lds_t taken() const { return barrier(4 * kSlots + 1); }

  // `arrivals`: how many fill a slot, which depends on the copying group.
  MLA_DEVICE void init_barriers(int arrivals) const {
    if (thread_index() == 0) {
      for (int s = 0; s < kSlots; ++s) {
        tile::barrier_init(filled(s), arrivals);
        tile::barrier_init(emptied(s), kValueWarps);  // the scorers are done with it by then
        tile::barrier_init(published(s), kGroupThreads);
        tile::barrier_init(adopted(s), kValueWarps);
      }
      tile::barrier_init(summed(), kGroupThreads);
      tile::barrier_init(taken(), kValueWarps * tile::kWave);
    }
    for (int i = thread_index(); i < kOnesBytes / 4; i += kThreads) {
      tile::store_word(ones() + i * 4, 0x38383838u);
    }
    tile::publish_shared();
    block_barrier();
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_LAYOUT_H_
