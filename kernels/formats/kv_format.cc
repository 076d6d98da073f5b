#include "kernels/formats/kv_format.h"

#include <algorithm>
#include <cstring>

namespace mla::kernels {
namespace {

// Returns values [first, first + count) of a row as the client sent it.
template <typename T>
struct Source {
  const T* values;
  float operator[](int32_t i) const {
    if constexpr (sizeof(T) == 2) return ToFloat(values[i]);
    return values[i];
  }
  Bf16 bf16(int32_t i) const {
    if constexpr (sizeof(T) == 2) return values[i];
    return ToBf16(values[i]);
  }
};

template <typename T>
void StoreBf16(Source<T> from, int32_t begin, int32_t end, std::byte* out) {
  for (int32_t i = begin; i < end; ++i) {
    const Bf16 value = Stored(from.bf16(i));
    std::memcpy(out + int64_t{i - begin} * 2, &value, sizeof value);
  }
}

template <typename T>
void StoreFp8(Source<T> from, int32_t begin, int32_t end, float inverse, Fp8Kind kind,
              std::byte* out) {
  for (int32_t i = begin; i < end; ++i) {
    const float value = from[i];
    const uint8_t code = EncodeFp8(value * inverse, kind);
    out[i - begin] = std::byte{IsPoison(value) ? Fp8NaN(kind) : code};
  }
}

// Returns the largest magnitude of a group, ignoring values that a row cannot hold.
template <typename T>
float Largest(Source<T> from, int32_t begin, int32_t end) {
  float largest = 0.0f;
  for (int32_t i = begin; i < end; ++i) {
    const float value = from[i];
    const float magnitude = IsPoison(value) ? 0.0f : value < 0.0f ? -value : value;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Returns the scale that all groups of a row share, or 0 if each has its own.
template <typename T>
float SharedScale(const KvRowLayout& layout, Fp8Kind kind, Source<T> from) {
  if (!layout.traits.shares_scale) return 0.0f;
  float maximum = 0.0f, least = kNoKvGroup;
  for (int32_t begin = 0; begin < layout.latent_dim; begin += layout.traits.group) {
    const float largest =
        Largest(from, begin, std::min(layout.latent_dim, begin + layout.traits.group));
    maximum = std::max(maximum, largest);
    if (largest > 0.0f) least = std::min(least, largest);
  }
  return KvSharedScale(least, maximum, kind);
}

// Returns true if scales are fp32 numbers rather than exponent bytes.
bool WideScales(const KvRowLayout& layout) {
  return layout.traits.scales == KvScales::kInRow || layout.traits.page_scale_bytes == 4;
}

void StoreScale(const KvRowLayout& layout, int32_t group, float scale, std::byte* scales) {
  if (WideScales(layout)) {
    std::memcpy(scales + int64_t{group} * 4, &scale, sizeof scale);
  } else {
    scales[group] = static_cast<std::byte>(std::bit_cast<uint32_t>(scale) >> 23);
  }
}

float LoadScale(const KvRowLayout& layout, int32_t group, const std::byte* scales) {
  uint32_t bits = 0;
  if (WideScales(layout)) {
    std::memcpy(&bits, scales + int64_t{group} * 4, sizeof bits);
  } else {
    const auto exponent = std::to_integer<uint32_t>(scales[group]);
    bits = exponent == 0 ? 1u << 22 : exponent << 23;  // 2^-127 is denormal
  }
  return std::bit_cast<float>(bits);
}

template <typename T>
void Encode(const KvRowLayout& layout, Fp8Kind kind, Source<T> from, float layer_scale,
            const KvRowPlace<std::byte>& place) {
  const int32_t latent = layout.latent_dim, dim = layout.latent_dim + layout.rope_dim;
  std::byte* const rope = place.row + layout.rope_at;
  switch (layout.traits.scales) {
    case KvScales::kNone:
      StoreBf16(from, 0, latent, place.row);
      return StoreBf16(from, latent, dim, rope);
    case KvScales::kLayer: {
      const float inverse = 1.0f / layer_scale;
      StoreFp8(from, 0, latent, inverse, kind, place.row);
      return StoreFp8(from, latent, dim, inverse, kind, rope);
    }
    case KvScales::kInRow:
    case KvScales::kInPage: {
      const float shared = SharedScale(layout, kind, from);
      for (int32_t group = 0; group < layout.groups; ++group) {
        const int32_t begin = group * layout.traits.group;
        const int32_t end = std::min(latent, begin + layout.traits.group);
        const float scale = shared > 0.0f ? shared : KvGroupScale(Largest(from, begin, end), kind);
        StoreFp8(from, begin, end, KvScaleInverse(scale), kind, place.row + begin);
        StoreScale(layout, group, scale, place.scales);
      }
      return StoreBf16(from, latent, dim, rope);
    }
  }
}

void LoadBf16(const std::byte* from, int32_t count, float* values) {
  for (int32_t i = 0; i < count; ++i) {
    Bf16 value;
    std::memcpy(&value, from + int64_t{i} * 2, sizeof value);
    values[i] = ToFloat(value);
  }
}

}  // namespace

void EncodeKvRow(const KvRowLayout& layout, Fp8Kind kind, const void* values, DType dtype,
                 float layer_scale, const KvRowPlace<std::byte>& place) {
  if (dtype == DType::kF32) {
    Encode(layout, kind, Source<float>{static_cast<const float*>(values)}, layer_scale, place);
  } else {
    Encode(layout, kind, Source<Bf16>{static_cast<const Bf16*>(values)}, layer_scale, place);
  }
}

void DecodeKvRow(const KvRowLayout& layout, Fp8Kind kind, float layer_scale,
                 const KvRowPlace<const std::byte>& place, float* values) {
  const auto code = [kind](const std::byte* at_byte) {
    return DecodeFp8(std::to_integer<uint8_t>(*at_byte), kind);
  };
  const std::byte* const rope = place.row + layout.rope_at;
  float* const rotated = values + layout.latent_dim;
  switch (layout.traits.scales) {
    case KvScales::kNone:
      LoadBf16(place.row, layout.latent_dim, values);
      return LoadBf16(rope, layout.rope_dim, rotated);
    case KvScales::kLayer:
      for (int32_t i = 0; i < layout.latent_dim; ++i) values[i] = code(place.row + i) * layer_scale;
      for (int32_t i = 0; i < layout.rope_dim; ++i) rotated[i] = code(rope + i) * layer_scale;
      return;
    case KvScales::kInRow:
    case KvScales::kInPage:
      for (int32_t group = 0; group < layout.groups; ++group) {
        const int32_t begin = group * layout.traits.group;
        const int32_t end = std::min(layout.latent_dim, begin + layout.traits.group);
        const float scale = KvScale(LoadScale(layout, group, place.scales), kind);
        for (int32_t i = begin; i < end; ++i) {
          values[i] = ToFloat(ToBf16(code(place.row + i) * scale));
        }
      }
      return LoadBf16(rope, layout.rope_dim, rotated);
  }
}

bool SameKvRow(const KvRowLayout& layout, const KvRowPlace<const std::byte>& a,
               const KvRowPlace<const std::byte>& b) {
  const auto same = [](const std::byte* x, const std::byte* y, int64_t bytes) {
    return bytes == 0 || std::memcmp(x, y, static_cast<size_t>(bytes)) == 0;
  };
  const int64_t latent =
      layout.latent_dim * static_cast<int64_t>(ElementSize(layout.traits.latent));
  const int64_t rope = layout.rope_dim * static_cast<int64_t>(ElementSize(layout.traits.rope));
  const int64_t scale = WideScales(layout) ? 4 : 1;
  return same(a.row, b.row, latent) && same(a.row + layout.rope_at, b.row + layout.rope_at, rope) &&
         same(a.scales, b.scales, layout.groups * scale);
}

}  // namespace mla::kernels
