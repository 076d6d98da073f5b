// The element types of tensors that cross the backend interface.
#ifndef MLA_KERNELS_FORMATS_DTYPE_H_
#define MLA_KERNELS_FORMATS_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace mla::kernels {

enum class DType : uint8_t {
  kBf16 = 1,     // brain float: upper half of an IEEE binary32
  kF32 = 2,      // IEEE binary32
  kFp8E4m3 = 3,  // eight bits, of the pool's kind (kernels/formats/fp8.h)
};

// Storage of one bf16 element; arithmetic happens in fp32.
using Bf16 = uint16_t;

struct DTypeTraits {
  size_t size;  // bytes of an element
  const char* name;
};

// No type has the number 0. TraitsOf is a switch because device code calls it too, and device code
// cannot read a table in host memory.
constexpr DTypeTraits TraitsOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return {2, "bf16"};
    case DType::kF32:
      return {4, "fp32"};
    case DType::kFp8E4m3:
      return {1, "fp8_e4m3"};
  }
  return {0, "none"};
}

constexpr size_t ElementSize(DType dtype) { return TraitsOf(dtype).size; }
constexpr const char* Name(DType dtype) { return TraitsOf(dtype).name; }

inline float ToFloat(Bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Rounds to nearest, ties to even; every NaN stays a (quiet) NaN.
inline Bf16 ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bf16>((bits >> 16) | 0x0040u);
  return static_cast<Bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// KV rows hold only numbers of magnitude below 2^80, and NaN. Anything larger, infinities included,
// is stored as NaN, which reaches every result that sees the row. With weights below kWeightBound
// in magnitude, no sum over a row leaves fp32's range in either form of attention. A result is
// therefore finite if its log-sum-exp is.
inline constexpr uint32_t kStoredBound = (127 + 80) << 7;  // as the bits of a bf16 magnitude
inline constexpr uint32_t kStoredNaN = 0x7fc0;
inline constexpr float kWeightBound = 1048576.0f;  // 2^20

// Returns an element of a KV row as the pool holds it.
constexpr Bf16 Stored(Bf16 value) {
  return static_cast<Bf16>((value & 0x7fffu) < kStoredBound ? value : kStoredNaN);
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_FORMATS_DTYPE_H_
