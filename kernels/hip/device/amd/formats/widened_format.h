// Widens rows of 8 bits on AMD to bf16 before they are stored in shared memory, once for all waves:
// rows of kFp8Page, the format of windows and entries, whose values are all both keys and values;
// and rows of kFp8Row if several waves read them.
#ifndef MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_WIDENED_FORMAT_H_
#define MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_WIDENED_FORMAT_H_

#include "kernels/hip/device/amd/formats/fp8_format.h"

namespace mla::kernels::hip {

// Both classes hold the scales of one row. chunk() widens the eight codes of two words, which
// belong to column block kBlock. If kAny is false, the row's scales must not be odd().

// Scales that are one byte for each block, the exponent of a power of two.
template <class Layout>
class PageExponents {
 public:
  MLA_DEVICE void load(const uint8_t* source) { exponents = *as_global<const tile::u32x2>(source); }
  // Returns true if some exponent is 0 or larger than that of any scale.
  MLA_DEVICE bool odd() const {
    return ((odd_bytes(exponents[0]) & 0x80808080u) | (odd_bytes(exponents[1]) & kUsedBytes)) != 0;
  }
  template <int kBlock, bool kAny>
  MLA_DEVICE tile::u32x4 chunk(uint32_t low, uint32_t high) const {
    uint32_t bits = (exponents[kBlock / 4] >> kBlock % 4 * 8 & 0xffu) << 23;
    if constexpr (kAny) {
      bits = bits > kLeastScaleBits ? bits : kLeastScaleBits;
      const bool invalid = bits > kLargestScaleBits;
      low = invalid ? kNaNs : low;
      high = invalid ? kNaNs : high;
    }
    return Fp8Codes::widened<false, true>(low, high, bits_to_float(bits));
  }

 private:
  // The codes of a block whose scale stands for NaN.
  static constexpr uint32_t kNaNs = Fp8NaN(kPoolFp8) * 0x01010101u;
  // Exponent byte 0 is the scale 2^-127, which is denormal. Zero bits would be a different scale in
  // conversions that multiply instead of adding exponents.
  static constexpr uint32_t kLeastScaleBits = 1u << 22;
  // The highest bits of the bytes tell exponents from which conversions differ.
  static constexpr uint32_t kUsedBytes = 0x80808080u >> (8 - Layout::kCodeBlocks) * 8;
  static constexpr uint32_t kLargest = kLargestScaleBits >> 23;
  static_assert(kLargest >= 0x80 && Layout::kCodeBlocks > 4);
  MLA_DEVICE static uint32_t odd_bytes(uint32_t exponents) {
    const uint32_t above = (exponents & 0x7f7f7f7fu) + (0xffu - kLargest) * 0x01010101u;
    const uint32_t zero = exponents - 0x01010101u;
    return (exponents & above) | (~exponents & zero);
  }

  tile::u32x2 exponents;
};

// Scales that are one fp32 for each group of two blocks.
template <class Layout>
class FloatScales {
 public:
  MLA_DEVICE void load(const uint8_t* source) { scales = *as_global<const tile::u32x4>(source); }
  // Returns true if some scale is not a power of two within the bounds of stored scales.
  MLA_DEVICE bool odd() const {
    const float all[4] = {scale(0), scale(1), scale(2), scale(3)};
    return Fp8Rows<Layout>::odd(all);
  }
  template <int kBlock, bool kAny>
  MLA_DEVICE tile::u32x4 chunk(uint32_t low, uint32_t high) const {
    const float by = scale(kBlock * 64 / Layout::kRow.traits.group);
    return Fp8Codes::widened<kAny, true>(low, high, kAny ? stored_scale(by) : by);
  }

 private:
  MLA_DEVICE float scale(int group) const { return bits_to_float(scales[group]); }

  tile::u32x4 scales;
};

// Copies rows for KvStream through registers, kRows rows a lane. A lane holds eight codes of each
// column block of a row, which are widened when they land; a chunk of the last block, which is
// bf16; and the scales of all blocks. Copies are numbered row by row.
template <class Layout, class Scales, int kRows>
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
  MLA_DEVICE void issue_scales(const uint8_t* source) {
    rows[kRow].scales.load(source);
  }
  // Writes a chunk widened by its scale, which must not be odd().
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t wave_base, int lane) const {
    land_chunk<kIndex, kOffset, false>(wave_base, lane);
  }
  // Returns true if some scale of this lane's row needs land_again().
  template <int kRow>
  MLA_DEVICE bool odd() const {
    return rows[kRow].scales.odd();
  }
  // Does what land() does, for any scale.
  template <int kIndex, int kOffset>
  MLA_DEVICE void land_again(lds_t wave_base, int lane) const {
    land_chunk<kIndex, kOffset, true>(wave_base, lane);
  }
  MLA_DEVICE void meet() { tile::wave_barrier(); }
  MLA_DEVICE void close_stage() {}
  template <int kYounger, int kPerStage>
  MLA_DEVICE void wait() {}

 private:
  struct Row {
    tile::u32x2 codes[Layout::kCodeBlocks];
    Scales scales;
    tile::u32x4 rotated;
  };

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
      return row.scales.template chunk<kBlock, kAny>(row.codes[kBlock][0], row.codes[kBlock][1]);
    }
  }

  Row rows[kRows];
};

// OfLayout is a WidenedLayout; Scales holds the scales of one of its rows.
template <class C, class W, class OfLayout, class Scales>
struct WidenedFormat : Bf16Format<C, W> {
  using Layout = OfLayout;
  static constexpr int kWaves = C::kRowWaves * C::kColWaves, kRowsPerCopy = tile::kWave / 8;
  using Copies = WideningCopies<Layout, Scales, C::kTileKv / kRowsPerCopy / kWaves>;
};
template <class C, class W>
using PageFormat = WidenedFormat<C, W, StageLayout<KvFormat::kFp8Page, C>,
                                 PageExponents<StageLayout<KvFormat::kFp8Page, C>>>;
template <class C, class W>
using WidenedRowFormat = WidenedFormat<C, W, WidenedRows<C>, FloatScales<WidenedRows<C>>>;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_AMD_FORMATS_WIDENED_FORMAT_H_
