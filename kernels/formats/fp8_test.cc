// Checks every code, every bf16 value, and both neighbours of every tie.
#include "kernels/formats/fp8.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "kernels/formats/dtype.h"

namespace mla::kernels {
namespace {

class Fp8Test : public testing::TestWithParam<Fp8Kind> {
 protected:
  Fp8Kind kind() const { return GetParam(); }
  bool ocp() const { return kind() == Fp8Kind::kE4m3Fn; }

  // Computed from the definition of the kind, without the bit tricks of the code under test.
  double Definition(uint8_t code) const {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (ocp() ? (code & 0x7f) == 0x7f : code == 0x80) return std::nan("");
    const int bias = ocp() ? 7 : 8;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -2 - bias)
                                           : std::ldexp(8 + mantissa, exponent - bias - 3);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
  }

  // Finds by search the code that round-to-nearest-even and saturation demand.
  uint8_t Nearest(double value) const {
    const double magnitude = std::abs(value);
    int best = 0;
    for (int code = 1; code <= kFp8LargestCode; ++code) {
      const double now = std::abs(Definition(static_cast<uint8_t>(best)) - magnitude);
      const double then = std::abs(Definition(static_cast<uint8_t>(code)) - magnitude);
      if (then < now || (then == now && code % 2 == 0)) best = code;
    }
    return static_cast<uint8_t>(best == 0 || value > 0 ? best : best | 0x80);
  }
};

TEST_P(Fp8Test, EveryCodeDecodesToItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const double want = Definition(byte);
    const float got = DecodeFp8(byte, kind());
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      EXPECT_TRUE(IsFp8NaN(byte, kind()));
    } else {
      EXPECT_EQ(got, want) << code;
      EXPECT_EQ(ToFloat(ToBf16(got)), got) << code << " is not a bf16 value";
      EXPECT_FALSE(IsFp8NaN(byte, kind()));
    }
  }
}

TEST_P(Fp8Test, EveryWrittenCodeComesBack) {
  for (int code = 0; code < 256; ++code) {
    if (code == 0x80 || (code & 0x7f) > kFp8LargestCode) continue;
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(EncodeFp8(DecodeFp8(byte, kind()), kind()), byte) << code;
  }
}

TEST_P(Fp8Test, EveryBf16ValueRoundsToTheNearestEvenCode) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = ToFloat(static_cast<Bf16>(bits));
    const uint8_t got = EncodeFp8(value, kind());
    if (std::isnan(value)) {
      ASSERT_EQ(got, Fp8NaN(kind())) << bits;
      continue;
    }
    ASSERT_EQ(got, Nearest(value)) << value;
    ASSERT_NE(got, 0x80) << value;
    ASSERT_LE(got & 0x7f, kFp8LargestCode) << value;
  }
}

TEST_P(Fp8Test, NeighboursOfTiesGoToTheirSides) {
  for (int code = 0; code < kFp8LargestCode; ++code) {
    const double low = Definition(static_cast<uint8_t>(code));
    const auto tie = static_cast<float>((low + Definition(static_cast<uint8_t>(code + 1))) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      const float below = std::nextafterf(tie, 0.0f), above = std::nextafterf(tie, 1e9f);
      EXPECT_EQ(EncodeFp8(sign * below, kind()), Nearest(sign * below)) << code;
      EXPECT_EQ(EncodeFp8(sign * tie, kind()), Nearest(sign * tie)) << code;
      EXPECT_EQ(EncodeFp8(sign * above, kind()), Nearest(sign * above)) << code;
    }
  }
}

TEST_P(Fp8Test, ExtremesSaturateAndVanish) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {kInfinity, 3e38f, 449.0f, 1e9f}) {
    EXPECT_EQ(EncodeFp8(value, kind()), 0x7e);
    EXPECT_EQ(EncodeFp8(-value, kind()), 0xfe);
  }
  EXPECT_EQ(DecodeFp8(0x7e, kind()), Fp8Largest(kind()));
  for (const float value : {-0.0f, -1e-45f, -1e-30f, -0x1p-11f, 1e-45f}) {
    EXPECT_EQ(EncodeFp8(value, kind()), 0) << value;
  }
}

// With its scale converted to the other kind, a byte stands for the same number.
TEST_P(Fp8Test, MovesToTheOtherKindExactly) {
  const Fp8Kind other = ocp() ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
  const float scale = 0.375f, other_scale = ScaleToKind(scale, other);
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const uint8_t moved = ToKind(byte, other);
    if (IsFp8NaN(byte, kind())) {
      EXPECT_TRUE(IsFp8NaN(moved, other)) << code;
      continue;
    }
    EXPECT_FALSE(IsFp8NaN(moved, other)) << code;
    const float want = DecodeFp8(byte, kind()) * scale;
    const float got = DecodeFp8(moved, other) * other_scale;
    if ((code & 0x7f) > kFp8LargestCode) {
      EXPECT_EQ(std::abs(got), Fp8Largest(kind()) * scale) << code;
    } else {
      EXPECT_EQ(got, want) << code;
    }
  }
  EXPECT_EQ(ScaleToKind(other_scale, kind()), scale);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Fp8Test, testing::Values(Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace mla::kernels
