#include "kernels/projected_weights.h"

#include <cstddef>
#include <cstring>
#include <numeric>

#include "kernels/formats/fp8.h"

namespace mla::kernels {

WeightWindow WindowOf(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                      int64_t head_begin, int64_t heads) {
  const int64_t q_dim = geometry.expanded_q_dim(), v_dim = geometry.v_dim;
  if (part == ProjectedPart::kQueries) {
    return {head_begin * q_dim, heads * q_dim, 0, shape.q_lora_rank};
  }
  return {0, shape.hidden_size, head_begin * v_dim, heads * v_dim};
}

int64_t ProjectedMatrix::bytes() const {
  constexpr int64_t kStep = 128;
  int64_t scales = 0;
  if (dtype == DType::kFp8E4m3) {
    scales = int64_t{(rows + scale_rows - 1) / scale_rows} * scale_pitch * int64_t{sizeof(float)};
  }
  return (weight_bytes() + scales + kStep - 1) / kStep * kStep;
}

ProjectedMatrix MatrixOf(const Geometry& geometry, const ProjectedShape& shape,
                         ProjectedPart part) {
  constexpr int32_t kStep = ProjectedShape::kRowStep;
  const bool queries = part == ProjectedPart::kQueries;
  ProjectedMatrix m;
  m.dtype = shape.weights;
  m.rows = queries ? geometry.num_heads * geometry.expanded_q_dim() : shape.hidden_size;
  m.depth = queries ? shape.q_lora_rank : geometry.num_heads * geometry.v_dim;
  m.padded_depth = (m.depth + kStep - 1) / kStep * kStep;
  if (m.dtype != DType::kFp8E4m3) return m;
  // Heads begin at multiples of their dim, and blocks at multiples of kScaleBlock.
  m.scale_rows = queries ? std::gcd(geometry.expanded_q_dim(), kScaleBlock) : kScaleBlock;
  m.scale_depth = queries ? kScaleBlock : std::gcd(geometry.v_dim, kScaleBlock);
  m.scale_pitch = (m.depth + m.scale_depth - 1) / m.scale_depth;
  return m;
}

int64_t ProjectedBytes(const Geometry& geometry, const ProjectedShape& shape) {
  if (!shape.present()) return 0;
  return MatrixOf(geometry, shape, ProjectedPart::kQueries).bytes() +
         MatrixOf(geometry, shape, ProjectedPart::kOutputs).bytes();
}

bool CanHoldCodes(const Geometry& geometry) {
  return geometry.expanded_q_dim() % kScaledQueryStep == 0 &&
         geometry.v_dim % kScaledValueStep == 0;
}

float ScaleOf(const WeightWindow& window, const void* weights, int64_t block) {
  float scale;
  std::memcpy(
      &scale,
      static_cast<const std::byte*>(weights) + window.elements() + block * int64_t{sizeof(scale)},
      sizeof(scale));
  return scale;
}

Bf16 WidenedWeight(uint8_t code, float scale) {
  return ToBf16(DecodeFp8(code, Fp8Kind::kE4m3Fn) * scale);
}

}  // namespace mla::kernels
