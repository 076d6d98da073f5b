#include "kernels/formats/stored_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace mla::kernels {
namespace {

// Poisons values of 16 or 8 bits. Returns true if one of them stands for NaN afterwards.
bool Poison(DType dtype, Fp8Kind kind, std::byte* values, int32_t count) {
  bool has_poison = false;
  if (dtype == DType::kFp8E4m3) {
    for (int32_t i = 0; i < count; ++i) {
      has_poison |= IsFp8NaN(static_cast<uint8_t>(values[i]), kind);
    }
    return has_poison;
  }
  for (int32_t i = 0; i < count; ++i) {
    Bf16 value;
    std::memcpy(&value, values + i * sizeof(value), sizeof(value));
    const bool large = (value & 0x7fffu) >= kStoredBound;
    has_poison |= large;
    value = Stored(value);
    std::memcpy(values + i * sizeof(value), &value, sizeof(value));
  }
  return has_poison;
}

bool PoisonRow(const KvRowLayout& at, Fp8Kind kind, const KvRowPlace<std::byte>& place,
               std::vector<float>* values) {
  bool has_poison = Poison(at.traits.rope, kind, place.row + at.rope_at, at.rope_dim);
  const KvScales scales = at.traits.scales;
  if (scales == KvScales::kNone || scales == KvScales::kLayer) {
    return Poison(at.traits.latent, kind, place.row, at.latent_dim) || has_poison;
  }
  // Either a code or its scale may stand for NaN, so the decoded values are looked at.
  values->resize(static_cast<size_t>(at.latent_dim + at.rope_dim));
  DecodeKvRow(at, kind, 1.0f, {place.row, place.scales}, values->data());
  return has_poison || std::any_of(values->begin(), values->begin() + at.latent_dim,
                                   [](float value) { return value != value; });
}

}  // namespace

int64_t PoisonRows(const KvRowLayout& at, Fp8Kind kind, std::byte* rows, int64_t row_stride,
                   int32_t page_rows, int64_t count) {
  std::vector<float> values;
  int64_t first = count;
  for (int64_t row = count; row-- > 0;) {
    const auto place = KvRowIn(at, rows, row_stride, page_rows, static_cast<int32_t>(row));
    if (PoisonRow(at, kind, place, &values)) first = row;
  }
  return first;
}

}  // namespace mla::kernels
