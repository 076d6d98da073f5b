// Places in the shared memory of a block of attend_rows.h, and the barriers between its groups.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_LAYOUT_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_LAYOUT_H_

#include "kernels/hip/device/sm90/decode/rows16_fp8/layout.h"
#include "kernels/hip/device/sm90/e4m3_instructions.h"

namespace mla::kernels::hip {

// An object holds only the address where the block's shared memory begins, so every thread makes
// its own. Items, tiles and slots are as in E4m3Layout (layout.h). It differs in these places:
//
//   queries         the rotated part is [64 x 64 bf16]
//   slots           as the queries, and the keys' scales as they were loaded
//   probabilities   for each of the two computing groups: [64 packed rows x 64 keys] binary16
template <class C>
struct E4m3RowsLayout {
  using lds_t = tile::lds_t;
  static constexpr bool kScaledRows = true;
  static_assert(C::kFormat == KvFormat::kFp8Row);
  static constexpr bool kLists = C::kAttention == AttentionKind::kSparse;
  static constexpr int kRows = 64;  // packed rows
  static constexpr int kKeys = C::kTileKv;
  static constexpr int kSlots = C::kStages;
  static constexpr int kBlocks = C::kLora / 128;
  static constexpr int kBlockBytes = kRows * 128;
  static constexpr int kLatentBytes = kBlocks * kBlockBytes;
  static constexpr int kRopeBytes = kRows * 128;
  static constexpr int kRawScaleBytes = kKeys * 16;
  static constexpr int kQueryBytes = kLatentBytes + kRopeBytes;
  static constexpr int kSlotBytes = kQueryBytes + kRawScaleBytes;
  static constexpr int kProbabilityBytes = kRows * 128;
  // Bytes a slot. For each key: a power of two that none of its scales exceeds, as its inverse and
  // its logarithm, both bf16; and each block's scale divided by that power, as binary16.
  static constexpr int kKeyScaleBytes = kKeys * 4 + kBlocks * kKeys * 2;
  // Bytes a slot: bit i is set if the queries see key i of the tile.
  static constexpr int kSeenBytes = kLists ? kKeys / 8 : 0;
  // Bytes of one array of stats: one fp32 number for each packed row. There are query_scale, sums
  // of both groups, and for each slot origin and old_factor.
  static constexpr int kStatBytes = kRows * 4;
  static constexpr int kStats = 3 + 2 * kSlots;
  static constexpr int kBarriers = 3 * kSlots + 4;
  static constexpr int kMovedBytes = 16, kOneScaleBytes = 16;
  static constexpr int kSharedBytes =
      kQueryBytes + 2 * kProbabilityBytes +
      kSlots * (kSlotBytes + kKeyScaleBytes + kSeenBytes + kMovedBytes + kOneScaleBytes) +
      kStats * kStatBytes + (kBarriers * 8 + 127) / 128 * 128;
  static_assert(kKeys == 64 && C::kLora == 512 && C::kRope == 64);
  static_assert(kSlotBytes % 1024 == 0 && kQueryBytes % 1024 == 0);

  static constexpr float kLeastScale = 0x1p-60f;  // of a key

  static constexpr int kGroupThreads = 128, kThreads = 3 * kGroupThreads;
  static constexpr int kGroupWarps = 4;

  lds_t base;

  MLA_DEVICE lds_t queries() const { return base; }
  MLA_DEVICE lds_t slot(int s) const { return base + kQueryBytes + s * kSlotBytes; }
  MLA_DEVICE lds_t rope(int s) const { return slot(s) + kLatentBytes; }
  MLA_DEVICE lds_t raw_scales(int s) const { return rope(s) + kRopeBytes; }
  MLA_DEVICE lds_t probabilities(int group) const {
    return slot(kSlots) + group * kProbabilityBytes;
  }
  MLA_DEVICE lds_t key_scales(int s) const { return probabilities(2) + s * kKeyScaleBytes; }
  // Returns the place of the values for 16 keys, from 16 * i on, and a block of columns.
  // block_scales are for scores: the factor from this block's scale to the next block's, or the
  // scale itself for the last block. ratios are for values: the scale divided by the key's power of
  // two; keys 2 k, 2 k + 1, 2 k + 8 and 2 k + 9 are neighbours.
  MLA_DEVICE lds_t block_scales(int s, int i, int b) const {
    return raw_scales(s) + i * 256 + b * 64;
  }
  MLA_DEVICE lds_t ratios(int s, int i, int b) const {
    return key_scales(s) + kKeys * 4 + i * 128 + b * 32;
  }
  // `power`: the bits of a power of two.
  MLA_DEVICE void write_key_scale(int s, int key, uint32_t power) const {
    const float exponent = static_cast<float>(static_cast<int>(power >> 23) - 127);
    const uint32_t inverse = (254u << 23) - power;
    tile::store_word(key_scales(s) + key * 4, float_to_bits(exponent) | inverse >> 16);
  }
  // Converts the scales of a quarter of a tile's keys, 16, which have been copied to a slot, to the
  // forms above. All lanes of a warp call it; keys of other quarters are not read. Addresses are
  // made from a lane that the compiler does not know, because keeping them over a loop would take
  // registers.
  MLA_DEVICE void convert_scales(int slot, int quarter, int lane) const {
    constexpr int kKeysOfQuarter = 16;
    const int own =
        static_cast<int>(tile::unknown(static_cast<uint32_t>(lane))) & (kKeysOfQuarter - 1);
    const int key = quarter * kKeysOfQuarter + own;
    const Chunk raw = tile::load_chunk_shared(raw_scales(slot) + key * 16);
    float scale[kBlocks], top = kLeastScale;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      scale[b] = stored_scale(bits_to_float(raw.w[b]));
      top = max_f(top, scale[b]);
    }
    const uint32_t power = (float_to_bits(top) + 0x7fffffu) & 0x7f800000u;
    const float inverse = bits_to_float((254u << 23) - power);
    bool one = float_to_bits(top) == power;  // implies that it is at least kLeastScale
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) one = one && scale[b] == top;
    const uint32_t of_rows = tile::ballot(one);
    if (lane == 0) tile::store_word(one_scale(slot) + quarter * 4, of_rows == ~0u ? 1u : 0u);
    tile::sync_warp();
    if (lane >= kKeysOfQuarter) return;
    write_key_scale(slot, key, power);
    const int place = (own & 7) / 2 * 4 + own / 8 * 2 + (own & 1);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      tile::store_half_word(ratios(slot, quarter, b) + place * 2,
                            tile::pack_f16(scale[b] * inverse, 0.0f) & 0xffffu);
    }
    // Factors for the scorers: each rescales the sum of one block to the scale of the next block.
    // So that factors stay bounded, a scale counts as at least 2^-40 of the largest before it.
    float largest = scale[0], before = scale[0];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) {
      const float least = max_f(largest * 0x1p-40f, 0x1p-100f);
      const float taken = scale[b] < least ? least : scale[b];
      tile::store_float(block_scales(slot, quarter, b - 1) + own * 4,
                        before * tile::reciprocal(taken));
      largest = max_f(largest, taken);
      before = taken;
    }
    tile::store_float(block_scales(slot, quarter, kBlocks - 1) + own * 4, before);
  }
  MLA_DEVICE lds_t seen(int s) const { return key_scales(kSlots) + s * kSeenBytes; }
  MLA_DEVICE lds_t stats(int i) const { return seen(kSlots) + i * kStatBytes; }
  MLA_DEVICE lds_t query_scale() const { return stats(0); }
  MLA_DEVICE lds_t sums(int group) const { return stats(1 + group); }
  MLA_DEVICE lds_t origin(int s) const { return stats(3 + s); }
  MLA_DEVICE lds_t old_factor(int s) const { return stats(3 + kSlots + s); }
  // Returns the place of a word for each warp that scores: nonzero if the old factor of one of its
  // rows is not 1.
  MLA_DEVICE lds_t moved(int s) const { return stats(kStats) + s * kMovedBytes; }
  // Returns the place of a word for each quarter of the keys: nonzero if each of these has one
  // scale, a power of two.
  MLA_DEVICE lds_t one_scale(int s) const { return moved(kSlots) + s * kOneScaleBytes; }
  MLA_DEVICE bool has_one_scale(int s) const {
    const Chunk warps = tile::load_chunk_shared(one_scale(s));
    return (warps.w[0] & warps.w[1] & warps.w[2] & warps.w[3]) != 0;
  }
  MLA_DEVICE lds_t barrier(int i) const { return one_scale(kSlots) + i * 8; }
  // filled: a slot's keys have arrived. emptied: they are no longer needed.
  MLA_DEVICE lds_t filled(int s) const { return barrier(s); }
  MLA_DEVICE lds_t emptied(int s) const { return barrier(kSlots + s); }
  // published: the probabilities of a group's tile are stored. adopted: they are no longer needed.
  MLA_DEVICE lds_t published(int group) const { return barrier(2 * kSlots + group); }
  MLA_DEVICE lds_t adopted(int group) const { return barrier(2 * kSlots + 2 + group); }
  // arrived: a slot's boxes are there, and the scales as they were loaded.
  MLA_DEVICE lds_t arrived(int s) const { return barrier(2 * kSlots + 4 + s); }

  // As E4m3Layout::init_barriers.
  MLA_DEVICE void init_barriers(int arrivals) const {
    if (thread_index() == 0) {
      for (int s = 0; s < kSlots; ++s) {
        tile::barrier_init(filled(s), arrivals);
        tile::barrier_init(arrived(s), 1);
        tile::barrier_init(emptied(s), 2 * kGroupWarps);
      }
      for (int group = 0; group < 2; ++group) {
        tile::barrier_init(published(group), kGroupThreads);
        tile::barrier_init(adopted(group), 2 * kGroupWarps);
      }
      tile::publish_shared();
    }
    block_barrier();
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_CODES_ROWS_LAYOUT_H_
