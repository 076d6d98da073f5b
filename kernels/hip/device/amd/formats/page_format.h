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
  template <int kIndex, int kOffset>
  MLA_DEVICE void land(lds_t wave_base, int lane) const {
    tile::shared_store<tile::u32x4>(
        wave_base + kOffset + lane * 16,
        chunk<kIndex % Layout::kBlocks>(rows[kIndex / Layout::kBlocks]));
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

  template <int kBlock>
  MLA_DEVICE static tile::u32x4 chunk(const Row& row) {
    if constexpr (kBlock == Layout::kCodeBlocks) return row.rotated;
    const uint32_t normal = (row.exponents[kBlock / 4] >> kBlock % 4 * 8 & 0xffu) << 23;
    const uint32_t bits = normal > kLeastScaleBits ? normal : kLeastScaleBits;
    const bool odd = bits > kLargestScaleBits;
    const uint32_t low = odd ? kNaNs : row.codes[kBlock][0];
    const uint32_t high = odd ? kNaNs : row.codes[kBlock][1];
    const float scale = bits_to_float(bits);
    return tile::u32x4{
        tile::bf16_of<false, true>(low, scale), tile::bf16_of<true, true>(low, scale),
        tile::bf16_of<false, true>(high, scale), tile::bf16_of<true, true>(high, scale)};
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
