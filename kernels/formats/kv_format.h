// Defines the layout of KV rows in pages: a table of formats, the places inside a row and a page,
// and the encoding of one row. Formats belong to a pool's pages and are never inferred from a
// device.
//
//   bf16        [latent bf16][rotated bf16]                                  1152 bytes at 512 + 64
//   fp8_tensor  [latent e4m3][rotated e4m3], one fp32 scale a layer,          576
//               which the model brings and records carry
//   fp8_row     [latent e4m3][fp32 scale of every 128 of them][rotated bf16]  656
//   fp8_page    [latent e4m3][rotated bf16] of all rows of a page, then a    584, DeepSeek V4's
//               byte of every 64 latent values: the exponent of their scale   at 448 + 64
//   index_key   [e4m3] of all rows of a page, then an fp32 scale of each row  132 at 128
//
// index_key is for the keys of an indexer (kernels/types/select.h); it is not a format of KV rows.
//
// A stored value stands for the same number on every backend:
//   fp8_tensor  code x scale
//   fp8_row,    code x scale, rounded to bf16. The encoder's scales are powers of two, so what it
//   fp8_page    wrote is not rounded; other scales may come with bytes from elsewhere. A scale
//               that is negative, NaN or above kLargestKvScale stands for NaN (KvScale).
//
// A value that a row cannot hold (NaN, an infinity, a magnitude of 2^80 and more; see Stored in
// kernels/formats/dtype.h) is kept as NaN by every format, and so reaches every result that sees
// the row. Magnitudes that only a scale makes too large saturate.
#ifndef MLA_KERNELS_FORMATS_KV_FORMAT_H_
#define MLA_KERNELS_FORMATS_KV_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/formats/dtype.h"
#include "kernels/formats/fp8.h"

namespace mla::kernels {

enum class KvFormat : uint8_t {
  kBf16 = 1,
  kFp8Tensor = 2,
  kFp8Row = 3,
  kFp8Page = 4,
  kIndexKey = 64,  // not on the wire
};
inline constexpr KvFormat kKvFormats[] = {KvFormat::kBf16, KvFormat::kFp8Tensor, KvFormat::kFp8Row,
                                          KvFormat::kFp8Page};

// Says how the latent values of a row are scaled, and where the scale lies.
enum class KvScales : uint8_t {
  kNone,
  kLayer,   // one fp32 for all values of a layer, outside the pool
  kInRow,   // an fp32 a group, after the row's latent values
  kInPage,  // one a group, after all rows of a page
};

struct KvFormatTraits {
  const char* name = "";
  DType latent = DType::kBf16;
  DType rope = DType::kBf16;
  KvScales scales = KvScales::kNone;
  int32_t group = 0;          // latent values a scale, for kInRow and kInPage
  int32_t page_multiple = 1;  // a page's bytes are a multiple of this
  // A scale in a page has this number of bytes: 4 for an fp32, or 1 for the exponent byte of a
  // binary32 (E8M0).
  int32_t page_scale_bytes = 1;
  bool shares_scale = false;  // groups of a row share a scale if KvSharedScale finds one
};

constexpr KvFormatTraits TraitsOf(KvFormat format) {
  switch (format) {
    case KvFormat::kFp8Tensor:
      return {"fp8_tensor", DType::kFp8E4m3, DType::kFp8E4m3, KvScales::kLayer};
    case KvFormat::kFp8Row:
      return {.name = "fp8_row",
              .latent = DType::kFp8E4m3,
              .scales = KvScales::kInRow,
              .group = 128,
              .shares_scale = true};
    case KvFormat::kFp8Page:
      return {"fp8_page", DType::kFp8E4m3, DType::kBf16, KvScales::kInPage, 64, 576};
    case KvFormat::kIndexKey:
      return {"index_key", DType::kFp8E4m3, DType::kBf16, KvScales::kInPage, 128, 16, 4};
    case KvFormat::kBf16:
      break;
  }
  return {"bf16"};
}

constexpr const char* Name(KvFormat format) { return TraitsOf(format).name; }

// The bytes of one row and the places of its parts. The latent values come first.
struct KvRowLayout {
  KvFormatTraits traits;
  int32_t latent_dim = 0, rope_dim = 0;
  int32_t groups = 0;             // scales of a row
  int32_t scales_at = 0;          // kInRow: bytes from the row's first
  int32_t rope_at = 0;            // bytes from the row's first
  int32_t row_bytes = 0;          // from a row to the next; excludes scales that the page holds
  int32_t page_scales_bytes = 0;  // kInPage: scales of one row
};

// kInPage pads the exponent bytes of a row to this many bytes.
inline constexpr int32_t kPageScalesMultiple = 8;

constexpr KvRowLayout MakeKvRowLayout(const KvFormatTraits& traits, int32_t latent_dim,
                                      int32_t rope_dim) {
  const auto round_up = [](int32_t bytes, int32_t to) { return (bytes + to - 1) / to * to; };
  KvRowLayout layout;
  layout.traits = traits;
  layout.latent_dim = latent_dim;
  layout.rope_dim = rope_dim;
  if (traits.group > 0) layout.groups = (latent_dim + traits.group - 1) / traits.group;
  const bool in_row = traits.scales == KvScales::kInRow;
  layout.scales_at = latent_dim * static_cast<int32_t>(ElementSize(traits.latent));
  if (in_row) layout.scales_at = round_up(layout.scales_at, 4);
  layout.rope_at = layout.scales_at + (in_row ? layout.groups * 4 : 0);
  layout.rope_at = round_up(layout.rope_at, static_cast<int32_t>(ElementSize(traits.rope)));
  layout.row_bytes = layout.rope_at + rope_dim * static_cast<int32_t>(ElementSize(traits.rope));
  if (in_row) layout.row_bytes = round_up(layout.row_bytes, 4);
  if (traits.scales == KvScales::kInPage) {
    const bool bytes = traits.page_scale_bytes == 1;
    layout.page_scales_bytes =
        bytes ? round_up(layout.groups, kPageScalesMultiple) : layout.groups * 4;
  }
  return layout;
}

constexpr KvRowLayout MakeKvRowLayout(KvFormat format, int32_t latent_dim, int32_t rope_dim) {
  return MakeKvRowLayout(TraitsOf(format), latent_dim, rope_dim);
}

// Returns the number of bytes of a page of `rows` rows that lie `row_stride` >= row_bytes apart.
constexpr int64_t KvPageBytes(const KvRowLayout& layout, int64_t row_stride, int64_t rows) {
  const int64_t bytes = rows * (row_stride + layout.page_scales_bytes);
  return (bytes + layout.traits.page_multiple - 1) / layout.traits.page_multiple *
         layout.traits.page_multiple;
}

// Addresses one row in memory. `Byte` is std::byte or const std::byte.
template <typename Byte>
struct KvRowPlace {
  Byte* row = nullptr;
  Byte* scales = nullptr;  // kInRow, kInPage
};

template <typename Byte>
constexpr KvRowPlace<Byte> KvRowIn(const KvRowLayout& layout, Byte* page, int64_t row_stride,
                                   int32_t page_rows, int32_t row) {
  Byte* const first = page + row * row_stride;
  if (layout.traits.scales == KvScales::kInPage) {
    return {first, page + page_rows * row_stride + int64_t{row} * layout.page_scales_bytes};
  }
  return {first, first + layout.scales_at};
}

// Bounds of the scales of kE4m3Fn; scales of kE4m3Fnuz are twice as large (ScaleToKind). Within
// these bounds no value of a row reaches 2^81, and the inverse of a scale is a normal number.
inline constexpr float kSmallestKvScale = 0x1p-100f;
inline constexpr float kLargestKvScale = 0x1p72f;

// Returns the value of a scale found in a page: itself, or NaN if it is out of bounds.
constexpr float KvScale(float scale, Fp8Kind kind) {
  const float largest = kind == Fp8Kind::kE4m3Fn ? kLargestKvScale : kLargestKvScale * 2;
  const bool good = std::bit_cast<uint32_t>(scale) <= std::bit_cast<uint32_t>(largest);
  return good ? scale : std::numeric_limits<float>::quiet_NaN();
}

// Returns the smallest power of two under which a group of largest magnitude `largest` does not
// saturate, at least kSmallestKvScale. REQUIRES largest < 2^80.
constexpr float KvGroupScale(float largest, Fp8Kind kind) {
  // Adds a carry to the exponent if the mantissa exceeds 1.75, the mantissa of the kind's largest
  // number.
  const uint32_t up = std::bit_cast<uint32_t>(largest) + 0x1fffffu;
  const uint32_t exponent = up >> 23;
  const uint32_t least = std::bit_cast<uint32_t>(kSmallestKvScale) >> 23;
  const uint32_t chosen = exponent < least + 8 ? least : exponent - 8;
  const float scale = std::bit_cast<float>(chosen << 23);
  return kind == Fp8Kind::kE4m3Fn ? scale : ScaleToKind(scale, Fp8Kind::kE4m3Fnuz);
}

// Groups whose own scales are within a factor of 2^4 share the largest of these. Kernels are faster
// over rows with one scale, and codes of the smallest group still have 11 binades of the 15.
inline constexpr float kKvSharedRange = 0x1p4f;

// The scale that all groups of a row share, or 0 if each has its own (KvGroupScale). `most` is the
// largest magnitude of the row, and `least` the smallest of its groups' largest magnitudes. Groups
// of zeros count as kNoKvGroup. REQUIRES both < 2^80.
inline constexpr float kNoKvGroup = 0x1p79f;
constexpr float KvSharedScale(float least, float most, Fp8Kind kind) {
  const float scale = KvGroupScale(most, kind);
  return scale <= KvGroupScale(least, kind) * kKvSharedRange ? scale : 0.0f;
}

// Returns 1 / scale, exactly, for a power of two from KvGroupScale.
constexpr float KvScaleInverse(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

// Returns true if a row cannot hold this value.
constexpr bool IsPoison(float value) {
  return (std::bit_cast<uint32_t>(value) & 0x7fffffffu) >= (kStoredBound << 16) - 0x8000u;
}

// Stores one row of latent_dim + rope_dim elements of `dtype` (bf16 or fp32). `layer_scale` is used
// by kLayer and is of the kind in use. Bytes between the parts of a row are not written.
void EncodeKvRow(const KvRowLayout& layout, Fp8Kind kind, const void* values, DType dtype,
                 float layer_scale, const KvRowPlace<std::byte>& place);

// Reads the values of a row, latent_dim + rope_dim of them.
void DecodeKvRow(const KvRowLayout& layout, Fp8Kind kind, float layer_scale,
                 const KvRowPlace<const std::byte>& place, float* values);

// Returns true if two rows have the same bytes, padding excepted.
bool SameKvRow(const KvRowLayout& layout, const KvRowPlace<const std::byte>& a,
               const KvRowPlace<const std::byte>& b);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_KV_FORMAT_H_
