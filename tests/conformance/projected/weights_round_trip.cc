#include "tests/conformance/projected/weights_round_trip.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/formats/fp8.h"
#include "kernels/projected_weights.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::Geometry;
using kernels::ProjectedPart;
using kernels::ProjectedShape;

// Any bits of finite numbers: zeros of both signs and subnormal numbers, too.
std::vector<Bf16> RandomBits(int64_t count, std::mt19937* random) {
  std::vector<Bf16> bits(static_cast<size_t>(count));
  for (Bf16& value : bits) {
    value = static_cast<Bf16>((*random)() & 0xffffu);
    constexpr uint32_t kExponent = 0x7f80;
    if ((value & kExponent) == kExponent) value = static_cast<Bf16>(value & 0x807fu);
  }
  bits[0] = 0x8000;
  return bits;
}

absl::Status Differs(const char* what, int32_t head) {
  return absl::InternalError(absl::StrCat(what, " of head ", head, " differs"));
}

absl::Status CheckUp(AttentionBackend& backend, int32_t slot, const Geometry& g,
                     std::mt19937* random) {
  const int64_t uk = int64_t{g.nope_dim} * g.kv_lora_rank;
  const int64_t uv = int64_t{g.kv_lora_rank} * g.v_dim;
  const std::vector<Bf16> w_uk = RandomBits(g.num_heads * uk, random);
  const std::vector<Bf16> w_uv = RandomBits(g.num_heads * uv, random);
  std::vector<Bf16> got_uk(static_cast<size_t>(uk)), got_uv(static_cast<size_t>(uv));
  if (absl::Status s =
          backend.LoadWeights(slot, g, 1, g.num_heads, w_uk.data() + uk, w_uv.data() + uv);
      !s.ok())
    return s;
  if (backend.ReadWeights(slot, g, 0, got_uk.data(), got_uv.data()).ok()) {
    return absl::InternalError("head 0 can be read before it is loaded");
  }
  if (absl::Status s = backend.LoadWeights(slot, g, 0, 1, w_uk.data(), w_uv.data()); !s.ok())
    return s;
  for (int32_t head = 0; head < g.num_heads; ++head) {
    if (absl::Status s = backend.ReadWeights(slot, g, head, got_uk.data(), got_uv.data()); !s.ok())
      return s;
    if (!std::equal(got_uk.begin(), got_uk.end(), w_uk.begin() + head * uk)) {
      return Differs("W_UK", head);
    }
    if (!std::equal(got_uv.begin(), got_uv.end(), w_uv.begin() + head * uv)) {
      return Differs("W_UV", head);
    }
  }
  Geometry other = g;
  ++other.v_dim;
  got_uv.resize(got_uv.size() + static_cast<size_t>(g.kv_lora_rank));
  for (const int32_t head : {-1, g.num_heads}) {
    if (backend.ReadWeights(slot, g, head, got_uk.data(), got_uv.data()).ok()) {
      return absl::InternalError("a head that there is not can be read");
    }
  }
  if (backend.ReadWeights(slot, other, 0, got_uk.data(), got_uv.data()).ok() ||
      backend.ReadWeights(-1, g, 0, got_uk.data(), got_uv.data()).ok()) {
    return absl::InternalError("weights of another geometry or slot can be read");
  }
  return absl::OkStatus();
}

// Returns the bytes of one head, in e4m3 with valid codes and scales of all magnitudes.
std::vector<std::byte> RandomHead(const kernels::WeightWindow& window, const ProjectedShape& shape,
                                  std::mt19937* random) {
  std::vector<std::byte> bytes(static_cast<size_t>(window.Bytes(shape.weights)));
  if (!shape.codes()) {
    const std::vector<Bf16> bits = RandomBits(window.elements(), random);
    std::memcpy(bytes.data(), bits.data(), bytes.size());
    return bytes;
  }
  for (int64_t i = 0; i < window.elements(); ++i) {
    const auto code = static_cast<uint8_t>((*random)() & 0xffu);
    const bool valid = (code & 0x7f) <= kernels::kFp8LargestCode && code != 0x80;
    bytes[static_cast<size_t>(i)] = std::byte{valid ? code : uint8_t{0}};
  }
  for (int64_t block = 0; block < window.blocks(); ++block) {
    const int exponent = static_cast<int>((*random)() % 172) - 100;  // 2^-100 to 2^71
    const float scale =
        block == 1 ? 0.0f
                   : std::ldexp(1.0f + static_cast<float>((*random)() % 1000) / 1001.0f, exponent);
    std::memcpy(&bytes[static_cast<size_t>(window.elements()) + size_t(block) * sizeof(scale)],
                &scale, sizeof(scale));
  }
  return bytes;
}

absl::Status CheckPart(AttentionBackend& backend, int32_t slot, const Geometry& g,
                       const ProjectedShape& shape, ProjectedPart part, std::mt19937* random) {
  std::vector<std::vector<std::byte>> weights;
  for (int32_t head = 0; head < g.num_heads; ++head) {
    weights.push_back(RandomHead(kernels::WindowOf(g, shape, part, head, 1), shape, random));
  }
  std::vector<std::byte> got(std::max_element(weights.begin(), weights.end(), [](auto& a, auto& b) {
                               return a.size() < b.size();
                             })->size());
  for (int32_t head = 0; head < g.num_heads; ++head) {
    if (backend.ReadProjected(slot, g, shape, part, head, got.data()).ok()) {
      return absl::InternalError(absl::StrCat("head ", head, " can be read before it is loaded"));
    }
    if (absl::Status s =
            backend.LoadProjected(slot, g, shape, part, head, weights[size_t(head)].data());
        !s.ok())
      return s;
  }
  for (int32_t head = 0; head < g.num_heads; ++head) {
    if (absl::Status s = backend.ReadProjected(slot, g, shape, part, head, got.data()); !s.ok())
      return s;
    const std::vector<std::byte>& want = weights[size_t(head)];
    if (!std::equal(want.begin(), want.end(), got.begin())) {
      return Differs(part == ProjectedPart::kQueries ? "W_UQ" : "W_O", head);
    }
  }
  ProjectedShape other = shape;
  --other.q_lora_rank;
  if (backend.ReadProjected(slot, g, other, part, 0, got.data()).ok() ||
      backend.ReadProjected(slot, g, shape, part, g.num_heads, got.data()).ok()) {
    return absl::InternalError("weights of another shape or head can be read");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckWeightsComeBack(AttentionBackend& backend, int32_t slot, const Geometry& geometry,
                                  const ProjectedShape& shape) {
  std::mt19937 random(7);
  if (absl::Status s = CheckUp(backend, slot, geometry, &random); !s.ok()) return s;
  if (!shape.present()) return absl::OkStatus();
  for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
    if (absl::Status s = CheckPart(backend, slot, geometry, shape, part, &random); !s.ok())
      return s;
  }
  return absl::OkStatus();
}

}  // namespace mla::conformance
