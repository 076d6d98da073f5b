// How KV rows of a format lie in shared memory, a tile of kTileKv rows a stage.
//
//   column blocks   of 128 bytes a row, chunks of 16 exchanged by tile::swizzle. The latent values
//                   first, as they lie in the row; the rotated ones begin a block of their own,
//                   which they fill or whose first half they fill
//   scales          of formats that have them in rows, fp32: of the first group of all rows, then
//                   of the next
//
// Bytes are those of the pool: rows are widened on their way from here to the products.
#ifndef MLA_KERNELS_HIP_KV_STAGE_LAYOUT_H_
#define MLA_KERNELS_HIP_KV_STAGE_LAYOUT_H_

#include "kernels/hip/common/memory.h"

namespace mla::kernels::hip {

// C: kTileKv, kLora and kRope.
template <KvFormat kFormat_, class C>
struct StageLayout {
  static constexpr KvFormat kFormat = kFormat_;
  static constexpr int kTileKv = C::kTileKv;
  static constexpr KvRowLayout kRow = MakeKvRowLayout(kFormat, C::kLora, C::kRope);
  static constexpr bool kFp8 = kRow.traits.latent == DType::kFp8E4m3;
  static constexpr bool kFp8Rope = kRow.traits.rope == DType::kFp8E4m3;
  static constexpr bool kLayerScale = kRow.traits.scales == KvScales::kLayer;
  static constexpr bool kRowScales = kRow.traits.scales == KvScales::kInRow;
  static constexpr int kGroups = kRowScales ? kRow.groups : 1;
  static constexpr int kGroupValues = kRowScales ? kRow.traits.group : C::kLora;

  static constexpr int kLatentBytes = C::kLora * (kFp8 ? 1 : 2);
  static constexpr int kRopeBytes = C::kRope * (kFp8Rope ? 1 : 2);
  static constexpr int kLatentBlocks = kLatentBytes / 128;
  static constexpr int kBlocks = kLatentBlocks + 1;
  static constexpr int kScalesAt = kBlocks * kTileKv * 128;
  static constexpr int kScaleWords = kRowScales ? kGroups * kTileKv : 0;
  static_assert(kLatentBytes % 128 == 0 && (kRopeBytes == 64 || kRopeBytes == 128));

  // Of a column block: its first byte in the row, and its chunks there.
  static constexpr int source(int block) {
    return block < kLatentBlocks ? block * 128 : kRow.rope_at;
  }
  static constexpr int chunks(int block) { return block < kLatentBlocks ? 8 : kRopeBytes / 16; }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_KV_STAGE_LAYOUT_H_
