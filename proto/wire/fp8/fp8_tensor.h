// The layout of a DTYPE_F8_E4M3 tensor on the wire: the codes of all vectors, row-major, then an
// fp32 scale for each part of each vector, without padding between them.
//
//   EXPANDED query head   1 part:   nope + rotated values
//   ABSORBED query head   2 parts:  latent values | rotated values
//   KV row                2 parts:  latent values | rotated values, and with an indexer a third
//   one,
//                                   the index key
//
// Pure functions; any thread.
#ifndef MLA_PROTO_WIRE_FP8_FP8_TENSOR_H_
#define MLA_PROTO_WIRE_FP8_FP8_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace mla::wire {

struct Fp8Tensor {
  int64_t vectors = 0;
  std::array<int32_t, 3> parts = {};  // values of each part; unused parts at the end are 0

  constexpr int32_t scales() const {  // of one vector
    return (parts[0] > 0 ? 1 : 0) + (parts[1] > 0 ? 1 : 0) + (parts[2] > 0 ? 1 : 0);
  }
  constexpr int64_t dim() const { return int64_t{parts[0]} + parts[1] + parts[2]; }
  constexpr int64_t values() const { return vectors * dim(); }
  // Returns the bytes of the tensor as it is sent. REQUIRES: no overflow.
  constexpr int64_t bytes() const { return values() + vectors * scales() * int64_t{sizeof(float)}; }
};

// Parts without values are left out, so they do not have a scale.
constexpr Fp8Tensor MakeFp8Tensor(int64_t vectors, std::initializer_list<int32_t> parts) {
  Fp8Tensor tensor{vectors, {}};
  size_t count = 0;
  for (const int32_t part : parts) {
    if (part > 0) tensor.parts[count++] = part;
  }
  return tensor;
}

// Writes the tensor of values [vectors, dim] to `sent`, which has bytes() bytes.
void EncodeFp8Tensor(const Fp8Tensor& tensor, const float* values, std::byte* sent);

// The first invalid scale (IsFp8Scale), by its place in the tensor; vector is -1 if all are valid.
struct BadFp8Scale {
  int64_t vector = -1;
  int32_t part = 0;
  float scale = 0;
};

// Decodes to bf16 (uint16_t) or fp32 (float) values [vectors, dim]. Stops at an invalid scale. Each
// byte of `sent` is read once, so that memory which others may still write can do no harm.
template <typename Value>
BadFp8Scale DecodeFp8Tensor(const Fp8Tensor& tensor, const std::byte* sent, Value* values);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_FP8_FP8_TENSOR_H_
