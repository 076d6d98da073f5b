// Rows of kFp8Page on AMD, the format of windows and entries. They are widened to bf16 before they
// are stored in shared memory, once for all waves, because all their values are both keys and
// values.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_PAGE_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_PAGE_FORMAT_H_

#include "kernels/hip/device/kv/tile_format.h"

namespace mla::kernels::hip {

// Copies for KvStream through registers, kRows rows a lane. Of each row a lane holds eight codes of
// each column block, widened when they land; a chunk of the last block, which is bf16; and the
// exponents of all blocks. Copies are numbered row by row.
template <class Layout, int kRows>
class WideningCopies {
 public:
  using lds_t = tile::lds_t;
  static constexpr bool kThroughRegisters = true;
  static constexpr bool kLookUpInLds = false;

  template <int kIndex, int kOffset>
  MLA_DEVICE void issue(lds_t, int, const void* source) {
    Row& row = rows[kIndex / Layout::kBlocks];
    constexpr int kBlock = kIndex % Layout::kBlocks;
    if constexpr (kBlock < Layout::kCodeBlocks) {
      row.codes[kBlock] = *as_global<const tile::u32x2>(source);
    } else {
      row.rotated = *as_global<const tile::u32x4>(source);
    }
  }
  template <int kRow>
  MLA_DEVICE void issue_exponents(const uint8_t* source) {
    rows[kRow].exponents = *as_global<const tile::u32x2>(source);
  }
  // Writes a chunk widened by its exponent, which must be that of a scale that is not odd().
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t wave_base, int lane) const {
    land_chunk<kIndex, kOffset, false>(wave_base, lane);
  }
  // Returns true if some exponent of this lane's row is 0 or larger than that of any scale.
  template <int kRow>
  MLA_DEVICE bool odd() const {
    const tile::u32x2 exponents = rows[kRow].exponents;
    return ((odd_bytes(exponents[0]) & 0x80808080u) | (odd_bytes(exponents[1]) & kUsedBytes)) != 0;
  }
  // As land(), for any exponent.
  template <int kIndex, int kOffset>
  MLA_DEVICE void land_again(lds_t wave_base, int lane) const {
    land_chunk<kIndex, kOffset, true>(wave_base, lane);
  }
  MLA_DEVICE void meet() { tile::wave_barrier(); }
  MLA_DEVICE void close_stage() {}
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {}

 private:
  // Codes of a block whose scale stands for NaN.
  static constexpr uint32_t kNaNs = Fp8NaN(kPoolFp8) * 0x01010101u;
  // Exponent byte 0 is the scale 2^-127, which is denormal. Zero bits would be a different scale in
  // conversions that multiply instead of adding exponents.
  static constexpr uint32_t kLeastScaleBits = 1u << 22;

  struct Row {
    tile::u32x2 codes[Layout::kCodeBlocks];
    tile::u32x2 exponents;  // a byte a block
    tile::u32x4 rotated;
  };

  // The highest bits of the bytes tell exponents from which conversions differ.
  static constexpr uint32_t kUsedBytes = 0x80808080u >> (8 - Layout::kCodeBlocks) * 8;
  static constexpr uint32_t kLargest = kLargestScaleBits >> 23;
  static_assert(kLargest >= 0x80 && Layout::kCodeBlocks > 4);
  MLA_DEVICE static uint32_t odd_bytes(uint32_t exponents) {
    const uint32_t above = (exponents & 0x7f7f7f7fu) + (0xffu - kLargest) * 0x01010101u;
    const uint32_t zero = exponents - 0x01010101u;
    return (exponents & above) | (~exponents & zero);
  }

  template <int kIndex, int kOffset, bool kAny>
  MLA_DEVICE void land_chunk(lds_t wave_base, int lane) const {
    tile::shared_store<tile::u32x4>(
        wave_base + kOffset + lane * 16,
        chunk<kIndex % Layout::kBlocks, kAny>(rows[kIndex / Layout::kBlocks]));
  }
  template <int kBlock, bool kAny>
  MLA_DEVICE static tile::u32x4 chunk(const Row& row) {
    if constexpr (kBlock == Layout::kCodeBlocks) {
      return row.rotated;
    } else {
      uint32_t bits = (row.exponents[kBlock / 4] >> kBlock % 4 * 8 & 0xffu) << 23;
      uint32_t low = row.codes[kBlock][0], high = row.codes[kBlock][1];
      if constexpr (kAny) {
        bits = bits > kLeastScaleBits ? bits : kLeastScaleBits;
        const bool invalid = bits > kLargestScaleBits;
        low = invalid ? kNaNs : low;
        high = invalid ? kNaNs : high;
      }
      const float scale = bits_to_float(bits);
      return tile::u32x4{
          tile::bf16_of<false, true>(low, scale), tile::bf16_of<true, true>(low, scale),
          tile::bf16_of<false, true>(high, scale), tile::bf16_of<true, true>(high, scale)};
    }
  }

  Row rows[kRows];
};

template <class C, class W>
struct PageFormat : Bf16Format<C, W, KvFormat::kFp8Page> {
  static constexpr int kWaves = C::kRowWaves * C::kColWaves, kRowsPerCopy = tile::kWave / 8;
  using Copies = WideningCopies<typename PageFormat::Layout, C::kTileKv / kRowsPerCopy / kWaves>;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_PAGE_FORMAT_H_
