#include "proto/wire/fp8/fp8_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "proto/wire/fp8/fp8_tensor.h"

namespace mla::wire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The number of a code by the definition of the format.
double NumberOf(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

TEST(Fp8CodecTest, EveryCodeIsDecoded) {
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  for (const float scale : {1.0f, 0.375f, 0x1p-100f, 0x1p72f, 1.2345678f}) {
    std::vector<uint16_t> bf16(256);
    std::vector<float> f32(256);
    DecodeFp8(codes.data(), codes.size(), scale, bf16.data());
    DecodeFp8(codes.data(), codes.size(), scale, f32.data());
    for (int i = 0; i < 256; ++i) {
      if ((i & 0x7f) == 0x7f) {
        EXPECT_TRUE(std::isnan(f32[i])) << i;
        EXPECT_TRUE(std::isnan(FromBf16(bf16[i]))) << i;
        continue;
      }
      const auto want = static_cast<float>(NumberOf(i) * scale);
      EXPECT_EQ(f32[i], want) << i;
      EXPECT_EQ(std::signbit(f32[i]), i >= 128) << i;
      EXPECT_LE(std::abs(FromBf16(bf16[i]) - want), std::abs(want) * 0x1p-8f) << i;
    }
  }
}

TEST(Fp8CodecTest, Bf16IsRoundedToEven) {
  // 1.125 x scale lies half way between two numbers of bf16, of which the lower one is even.
  const float scale = 1.0f + 0x1p-7f;
  const float product = 1.125f * scale;
  const uint8_t code = 0x39;
  ASSERT_EQ(NumberOf(code), 1.125);
  uint16_t bf16 = 0;
  DecodeFp8(&code, 1, scale, &bf16);
  const auto bits = std::bit_cast<uint32_t>(product);
  const uint32_t low = bits & 0xffffu, floor = bits >> 16;
  EXPECT_EQ(bf16, low > 0x8000u || (low == 0x8000u && (floor & 1) != 0) ? floor + 1 : floor);
}

TEST(Fp8CodecTest, TheNearestCodeIsWritten) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-12, 9), sign(-1, 1);
  std::vector<float> values;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(std::copysign(std::exp2(exponent(random)), sign(random)));
  }
  // Every number, and every middle of two.
  for (int code = 0; code < 0x7e; ++code) {
    values.push_back(static_cast<float>(NumberOf(code)));
    values.push_back(static_cast<float>((NumberOf(code) + NumberOf(code + 1)) / 2));
  }
  for (const float value : values) {
    const int code = EncodeFp8(value);
    ASSERT_NE(code & 0x7f, 0x7f) << value;
    const double off = std::abs(NumberOf(code) - value);
    for (int other = 0; other < 256; ++other) {
      if ((other & 0x7f) == 0x7f) continue;
      const double others = std::abs(NumberOf(other) - value);
      ASSERT_LE(off, others) << value;
      // Ties go to the even code; zero has one code.
      if (off == others && NumberOf(other) != NumberOf(code)) {
        ASSERT_EQ(code & 1, 0) << value;
      }
    }
    if (NumberOf(code) == 0) {
      EXPECT_EQ(code, 0);
    }
  }
}

TEST(Fp8CodecTest, OutsideOfItsRange) {
  EXPECT_EQ(EncodeFp8(448.0f), 0x7e);
  EXPECT_EQ(EncodeFp8(1e9f), 0x7e);
  EXPECT_EQ(EncodeFp8(kInfinity), 0x7e);
  EXPECT_EQ(EncodeFp8(-kInfinity), 0xfe);
  EXPECT_EQ(EncodeFp8(kNaN) & 0x7f, 0x7f);
  EXPECT_EQ(EncodeFp8(-0.0f), 0);
  EXPECT_EQ(EncodeFp8(1e-30f), 0);
}

TEST(Fp8CodecTest, ScalesArePowersOfTwoThatDoNotSaturate) {
  for (const float largest : {448.0f, 448.1f, 1.0f, 3.0f, 1e-20f, 1e20f}) {
    const std::vector<float> values = {largest * 0.1f, -largest, kNaN, kInfinity};
    const float scale = Fp8ScaleOf(values.data(), values.size());
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5f);
    EXPECT_LE(largest / scale, 448.0f);
    EXPECT_GT(largest / (scale / 2), 448.0f);
    EXPECT_TRUE(IsFp8Scale(scale));
  }
  const std::vector<float> zeros(8, 0.0f);
  EXPECT_EQ(Fp8ScaleOf(zeros.data(), zeros.size()), kSmallestFp8Scale);
  const std::vector<float> huge(1, 3e38f);
  EXPECT_EQ(Fp8ScaleOf(huge.data(), 1), kLargestFp8Scale);
  for (const float bad : {0.0f, -1.0f, kNaN, kInfinity, 0x1p-101f, 0x1p73f}) {
    EXPECT_FALSE(IsFp8Scale(bad)) << bad;
  }
}

TEST(Fp8CodecTest, ErrorsStayWithinWhatIsStated) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> spread(-30, 30);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> values(192);
    const float size = std::exp2(spread(random));
    float largest = 0;
    for (float& value : values) {
      value = normal(random) * size * std::exp2(spread(random) / 3 - 10);
      largest = std::max(largest, std::abs(value));
    }
    std::vector<uint8_t> codes(values.size());
    const float scale = EncodeFp8(values.data(), values.size(), codes.data());
    std::vector<uint16_t> bf16(values.size());
    std::vector<float> f32(values.size());
    DecodeFp8(codes.data(), codes.size(), scale, bf16.data());
    DecodeFp8(codes.data(), codes.size(), scale, f32.data());
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(FromBf16(bf16[i]), f32[i]);  // no second rounding
      const float off = std::abs(f32[i] - values[i]);
      EXPECT_LE(off, std::max(std::abs(values[i]) * 0x1p-4f, largest * 0x1p-17f));
    }
  }
}

TEST(Fp8TensorTest, ScalesFollowTheCodesOfAllVectors) {
  const Fp8Tensor tensor{2, {3, 2}};
  EXPECT_EQ(tensor.scales(), 2);
  EXPECT_EQ(tensor.bytes(), 2 * 5 + 2 * 2 * 4);
  const std::vector<float> values = {448, -224, 0, 1, 0.5f, 1024, 512, -256, 0x1p-20f, 0};
  std::vector<std::byte> sent(static_cast<size_t>(tensor.bytes()));
  EncodeFp8Tensor(tensor, values.data(), sent.data());
  float scales[4];
  std::memcpy(scales, sent.data() + 10, sizeof(scales));
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 0x1p-8f);
  EXPECT_EQ(scales[2], 4.0f);
  EXPECT_EQ(scales[3], 0x1p-28f);
  std::vector<float> decoded(values.size());
  EXPECT_EQ(DecodeFp8Tensor(tensor, sent.data(), decoded.data()).vector, -1);
  EXPECT_EQ(decoded, values);
}

TEST(Fp8TensorTest, NamesTheFirstScaleThatIsNone) {
  const Fp8Tensor tensor{3, {4, 4, 4}};
  std::vector<std::byte> sent(static_cast<size_t>(tensor.bytes()));
  std::vector<float> scales(9, 1.0f), decoded(36);
  scales[5] = -2.0f;
  scales[7] = kNaN;
  std::memcpy(sent.data() + 36, scales.data(), scales.size() * sizeof(float));
  const BadFp8Scale bad = DecodeFp8Tensor(tensor, sent.data(), decoded.data());
  EXPECT_EQ(bad.vector, 1);
  EXPECT_EQ(bad.part, 2);
  EXPECT_EQ(bad.scale, -2.0f);
}

}  // namespace
}  // namespace mla::wire
