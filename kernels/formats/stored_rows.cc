#include "kernels/formats/stored_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace mla::kernels {
namespace {

// Returns true if one of the codes stands for NaN. The loops here have no branch, so compilers
// vectorise them: every byte of a hand-over comes through one.
bool AnyFp8NaN(Fp8Kind kind, const std::byte* codes, int32_t count) {
  uint8_t flags = 0;
  if (kind == Fp8Kind::kE4m3Fn) {
    // Only the magnitude 0x7f carries into the upper bit.
    for (int32_t i = 0; i < count; ++i) {
      flags |= static_cast<uint8_t>((std::to_integer<uint8_t>(codes[i]) & 0x7f) + 1);
    }
    return (flags & 0x80) != 0;
  }
  for (int32_t i = 0; i < count; ++i) {
    flags |= static_cast<uint8_t>(codes[i] == std::byte{Fp8NaN(Fp8Kind::kE4m3Fnuz)});
  }
  return flags != 0;
}

// Returns true if a row cannot hold one of the values.
bool AnyBeyondBound(const std::byte* values, int32_t count) {
  // Magnitudes have 15 bits. With this added, those from the bound on carry into the upper bit.
  constexpr uint32_t kCarry = 0x8000u - kStoredBound;
  uint16_t flags = 0;
  for (int32_t i = 0; i < count; ++i) {
    Bf16 value;
    std::memcpy(&value, values + i * sizeof(value), sizeof(value));
    flags |= static_cast<uint16_t>((value & 0x7fffu) + kCarry);
  }
  return (flags & 0x8000u) != 0;
}

// Makes 16-bit values NaN if they are beyond the bound of stored values (Stored); 8-bit codes stay
// as they are. Returns true if a value stands for NaN afterwards.
bool Poison(DType dtype, Fp8Kind kind, std::byte* values, int32_t count) {
  if (dtype == DType::kFp8E4m3) return AnyFp8NaN(kind, values, count);
  if (!AnyBeyondBound(values, count)) return false;
  for (int32_t i = 0; i < count; ++i) {
    Bf16 value;
    std::memcpy(&value, values + i * sizeof(value), sizeof(value));
    value = Stored(value);
    std::memcpy(values + i * sizeof(value), &value, sizeof(value));
  }
  return true;
}

bool PoisonRow(const KvRowLayout& layout, Fp8Kind kind, const KvRowPlace<std::byte>& place,
               std::vector<float>* values) {
  bool has_poison = Poison(layout.traits.rope, kind, place.row + layout.rope_at, layout.rope_dim);
  const KvScales scales = layout.traits.scales;
  if (scales == KvScales::kNone || scales == KvScales::kLayer) {
    return Poison(layout.traits.latent, kind, place.row, layout.latent_dim) || has_poison;
  }
  // Either a code or its scale may stand for NaN, so the decoded values are looked at.
  values->resize(static_cast<size_t>(layout.latent_dim + layout.rope_dim));
  DecodeKvRow(layout, kind, 1.0f, {place.row, place.scales}, values->data());
  return has_poison || std::any_of(values->begin(), values->begin() + layout.latent_dim,
                                   [](float value) { return value != value; });
}

}  // namespace

int64_t PoisonRows(const KvRowLayout& layout, Fp8Kind kind, std::byte* rows, int64_t row_stride,
                   int32_t page_rows, int64_t count) {
  std::vector<float> values;
  int64_t first = count;
  for (int64_t row = count; row-- > 0;) {
    const auto place = KvRowIn(layout, rows, row_stride, page_rows, static_cast<int32_t>(row));
    if (PoisonRow(layout, kind, place, &values)) first = row;
  }
  return first;
}

}  // namespace mla::kernels
