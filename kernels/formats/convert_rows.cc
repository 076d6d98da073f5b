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

void ConvertScales(const KvRowLayout& at, Fp8Kind to, std::byte* scales) {
  const bool bytes = at.traits.scales == KvScales::kInPage && at.traits.page_scale_bytes == 1;
  for (int32_t group = 0; group < at.groups; ++group) {
    if (bytes) {
      scales[group] = ExponentToKind(scales[group], to);
      continue;
    }
    float scale;
    std::memcpy(&scale, scales + int64_t{group} * 4, sizeof(scale));
    scale = ScaleToKind(scale, to);
    std::memcpy(scales + int64_t{group} * 4, &scale, sizeof(scale));
  }
}

}  // namespace

void ConvertRows(const KvRowLayout& at, Fp8Kind to, std::byte* rows, int64_t row_stride,
                 int32_t page_rows, int64_t count) {
  const KvScales scales = at.traits.scales;
  for (int64_t row = 0; row < count; ++row) {
    const auto place = KvRowIn(at, rows, row_stride, page_rows, static_cast<int32_t>(row));
    if (at.traits.latent == DType::kFp8E4m3) ConvertCodes(to, place.row, at.latent_dim);
    if (at.traits.rope == DType::kFp8E4m3) ConvertCodes(to, place.row + at.rope_at, at.rope_dim);
    if (scales == KvScales::kInRow || scales == KvScales::kInPage) {
      ConvertScales(at, to, place.scales);
    }
  }
}

}  // namespace mla::kernels
