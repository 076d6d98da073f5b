#include "proto/wire/fp8/fp8_tensor.h"

#include <cstring>

#include "proto/wire/fp8/fp8_codec.h"

namespace mla::wire {

void EncodeFp8Tensor(const Fp8Tensor& tensor, const float* values, std::byte* sent) {
  auto* code = reinterpret_cast<uint8_t*>(sent);
  std::byte* scale_at = sent + tensor.values();
  for (int64_t vector = 0; vector < tensor.vectors; ++vector) {
    for (int32_t part = 0; part < tensor.scales(); ++part) {
      const auto count = static_cast<size_t>(tensor.parts[part]);
      const float scale = EncodeFp8(values, count, code);
      std::memcpy(scale_at, &scale, sizeof(scale));
      values += count;
      code += count;
      scale_at += sizeof(scale);
    }
  }
}

template <typename Value>
BadFp8Scale DecodeFp8Tensor(const Fp8Tensor& tensor, const std::byte* sent, Value* values) {
  const auto* code = reinterpret_cast<const uint8_t*>(sent);
  const std::byte* scale_at = sent + tensor.values();
  for (int64_t vector = 0; vector < tensor.vectors; ++vector) {
    for (int32_t part = 0; part < tensor.scales(); ++part) {
      const auto count = static_cast<size_t>(tensor.parts[part]);
      float scale = 0;
      std::memcpy(&scale, scale_at, sizeof(scale));
      if (!IsFp8Scale(scale)) return {vector, part, scale};
      DecodeFp8(code, count, scale, values);
      values += count;
      code += count;
      scale_at += sizeof(scale);
    }
  }
  return {};
}

template BadFp8Scale DecodeFp8Tensor(const Fp8Tensor&, const std::byte*, uint16_t*);
template BadFp8Scale DecodeFp8Tensor(const Fp8Tensor&, const std::byte*, float*);

}  // namespace mla::wire
