#include "client/mlactl/tensors/value_bounds.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace mla::mlactl {
namespace {

float Magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

void Extend(std::vector<float>* maxima, float value) {
  maxima->push_back(maxima->empty() ? value : std::max(maxima->back(), value));
}

}  // namespace

std::vector<float> ToFloats(std::span<const std::byte> bytes, v1::DType dtype) {
  std::vector<float> values(bytes.size() / (dtype == v1::DTYPE_F32 ? 4 : 2));
  if (values.empty()) return values;
  if (dtype == v1::DTYPE_F32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    values[i] = std::bit_cast<float>(uint32_t{half} << 16);
  }
  return values;
}

ValueProjection::ValueProjection(const v1::ModelSpec& model)
    : heads_(model.geometry().num_heads()),
      lora_(model.geometry().kv_lora_rank()),
      nope_(model.geometry().nope_dim()),
      v_(model.geometry().v_dim()),
      layers_(model.layers()),
      row_(v_) {}

void ValueProjection::Add(uint32_t layer, uint32_t head_begin, uint32_t head_count,
                          std::span<const std::byte> weights) {
  std::vector<float>& of_layer = layers_[layer];
  of_layer.resize(heads_ * lora_ * v_);
  const std::vector<float> values =
      ToFloats(weights.subspan(head_count * nope_ * lora_ * 2), v1::DTYPE_BF16);
  std::copy(values.begin(), values.end(),
            of_layer.begin() + static_cast<std::ptrdiff_t>(head_begin * lora_ * v_));
}

float ValueProjection::Largest(uint32_t layer, std::span<const float> latent) {
  const std::vector<float>& weights = layers_[layer];
  float largest = 0;
  for (size_t head = 0; head < heads_ && !weights.empty(); ++head) {
    std::fill(row_.begin(), row_.end(), 0.0F);
    for (size_t i = 0; i < lora_; ++i) {
      const float* const w = weights.data() + (head * lora_ + i) * v_;
      float* const row = row_.data();
      for (size_t j = 0; j < v_; ++j) row[j] += latent[i] * w[j];
    }
    largest = std::max(largest, Magnitude(row_));
  }
  return largest;
}

void ValueBounds::AddRow(uint32_t layer, uint64_t position, std::span<const float> latent,
                         ValueProjection* projection) {
  Layer& one = layers_[layer];
  if (position != one.latent.size()) return;
  Extend(&one.latent, Magnitude(latent));
  Extend(&one.projected, projection->Largest(layer, latent));
}

double ValueBounds::Largest(uint32_t layer, uint64_t position, v1::Profile profile) const {
  const Layer& one = layers_[layer];
  return profile == v1::PROFILE_EXPANDED ? one.projected[position] : one.latent[position];
}

void ValueBounds::Truncate(uint64_t rows) {
  for (Layer& one : layers_) {
    one.latent.resize(std::min<uint64_t>(rows, one.latent.size()));
    one.projected.resize(one.latent.size());
  }
}

}  // namespace mla::mlactl
