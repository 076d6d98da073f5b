#include "kernels/formats/convert_rows.h"

#include <cstring>

namespace mla::kernels {
namespace {

void ConvertCodes(Fp8Kind to, std::byte* codes, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    codes[i] = std::byte{ToKind(std::to_integer<uint8_t>(codes[i]), to)};
  }
}

// Returns the exponent byte of `exponent` in kind `to`. A byte stands for 2^(byte - 127), and 255
// for NaN. Results saturate at 2^-127, and above 2^127 they are NaN.
std::byte ExponentToKind(std::byte exponent, Fp8Kind to) {
  const auto byte = std::to_integer<uint8_t>(exponent);
  if (byte == 255) return exponent;
  if (to == Fp8Kind::kE4m3Fnuz) return std::byte{static_cast<uint8_t>(byte + 1)};
  return std::byte{static_cast<uint8_t>(byte == 0 ? 0 : byte - 1)};
}

void ConvertScales(const KvRowLayout& layout, Fp8Kind target, std::byte* scales) {
  const bool bytes =
      layout.traits.scales == KvScales::kInPage && layout.traits.page_scale_bytes == 1;
  for (int32_t group = 0; group < layout.groups; ++group) {
    if (bytes) {
      scales[group] = ExponentToKind(scales[group], target);
      continue;
    }
    float scale;
    std::memcpy(&scale, scales + int64_t{group} * 4, sizeof(scale));
    scale = ScaleToKind(scale, target);
    std::memcpy(scales + int64_t{group} * 4, &scale, sizeof(scale));
  }
}

}  // namespace

void ConvertRows(const KvRowLayout& layout, Fp8Kind target, std::byte* rows, int64_t row_stride,
                 int32_t page_rows, int64_t count) {
  const KvScales scales = layout.traits.scales;
  for (int64_t row = 0; row < count; ++row) {
    const auto place = KvRowIn(layout, rows, row_stride, page_rows, static_cast<int32_t>(row));
    if (layout.traits.latent == DType::kFp8E4m3) ConvertCodes(target, place.row, layout.latent_dim);
    if (layout.traits.rope == DType::kFp8E4m3)
      ConvertCodes(target, place.row + layout.rope_at, layout.rope_dim);
    if (scales == KvScales::kInRow || scales == KvScales::kInPage) {
      ConvertScales(layout, target, place.scales);
    }
  }
}

}  // namespace mla::kernels
