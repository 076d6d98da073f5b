// Lays out KV rows of a format in shared memory, a tile of kTileKv rows a stage.
//
//   column blocks   of 128 bytes a row, chunks of 16 permuted by tile::swizzle. The latent values
//                   come first, in the order of the row; the rotated ones begin a new block and
//                   fill it, or its first half
//   scales          fp32, in formats that have them in rows: the first group's for all rows, then
//                   the next group's
//
// Rows keep the pool's bytes and are widened when products load them, unless a layout is of widened
// rows: they are widened before they are stored here, once for all waves, and lie as bf16 rows do.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_STAGE_LAYOUT_H_
#define MLA_KERNELS_HIP_DEVICE_KV_STAGE_LAYOUT_H_

#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// Gives the layout of a row of kFormat_ in a stage; C provides kTileKv, kLora and kRope.
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
  static constexpr int kBlocks = kLatentBlocks + (C::kRope > 0 ? 1 : 0);
  static constexpr int kScalesAt = kBlocks * kTileKv * 128;
  static constexpr int kScaleWords = kRowScales ? kGroups * kTileKv : 0;
  static_assert(kLatentBytes % 128 == 0 &&
                (C::kRope == 0 || kRopeBytes == 64 || kRopeBytes == 128));

  static constexpr bool kWidened = false;     // true: rows come here as bf16, whatever the pool has
  static constexpr bool kPageScales = false;  // true: scales of widened rows lie in the page
  // Return, for a column block: its first byte in the row, the bytes of a chunk, and the number of
  // its chunks.
  static constexpr int source(int block) {
    return block < kLatentBlocks ? block * 128 : kRow.rope_at;
  }
  static constexpr int chunk_bytes(int) { return 16; }
  static constexpr int chunks(int block) { return block < kLatentBlocks ? 8 : kRopeBytes / 16; }
};

// Gives the layout of rows of 8 bits that lie in a stage as bf16: 64 codes in each column block,
// and bf16 values in the last.
template <KvFormat kFormat_, class C, int kRotated, int kLatent>
struct WidenedLayout : StageLayout<KvFormat::kBf16, C> {
  using Base = StageLayout<KvFormat::kBf16, C>;
  static constexpr KvFormat kFormat = kFormat_;
  static constexpr KvRowLayout kRow = MakeKvRowLayout(kFormat, kLatent, kRotated);
  static constexpr bool kWidened = true;
  static constexpr int kCodeBlocks = Base::kBlocks - 1;
  static constexpr int source(int block) { return block < kCodeBlocks ? block * 64 : kRow.rope_at; }
  static constexpr int chunk_bytes(int block) { return block < kCodeBlocks ? 8 : 16; }
  static_assert(kRotated == 64 && kLatent == kCodeBlocks * 64);
  static_assert(kRow.traits.rope == DType::kBf16);
};

// C::kLora includes the rotated values.
template <class C>
struct StageLayout<KvFormat::kFp8Page, C>
    : WidenedLayout<KvFormat::kFp8Page, C, 64, C::kLora - 64> {
  using Widened = WidenedLayout<KvFormat::kFp8Page, C, 64, C::kLora - 64>;
  static constexpr bool kPageScales = true;
  static_assert(C::kRope == 0);
  static_assert(Widened::kRow.traits.group == 64 && Widened::kRow.page_scales_bytes == 8);
};

template <class C>
struct WidenedRows : WidenedLayout<KvFormat::kFp8Row, C, C::kRope, C::kLora> {
  using Widened = WidenedLayout<KvFormat::kFp8Row, C, C::kRope, C::kLora>;
  static_assert(Widened::kRow.traits.group == 128 && Widened::kRow.groups == 4);
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_STAGE_LAYOUT_H_
