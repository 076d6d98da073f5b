#include "kernels/formats/kv_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::byte kUntouched{0xa5};

TEST(KvRowLayoutTest, SizesAreThoseOfTheKnownFormats) {
  EXPECT_EQ(MakeKvRowLayout(KvFormat::kBf16, 512, 64).row_bytes, 1152);
  EXPECT_EQ(MakeKvRowLayout(KvFormat::kFp8Tensor, 512, 64).row_bytes, 576);
  const KvRowLayout row = MakeKvRowLayout(KvFormat::kFp8Row, 512, 64);
  EXPECT_EQ(row.row_bytes, 656);
  EXPECT_EQ(row.groups, 4);
  EXPECT_EQ(row.scales_at, 512);
  EXPECT_EQ(row.rope_at, 528);
  EXPECT_EQ(KvPageBytes(row, row.row_bytes, 64), 656 * 64);
  // DeepSeek V4's page: rows first, then the scales of all rows; a page is a multiple of 576 bytes.
  const KvRowLayout planar = MakeKvRowLayout(KvFormat::kFp8Page, 448, 64);
  EXPECT_EQ(planar.row_bytes, 576);
  EXPECT_EQ(planar.groups, 7);
  EXPECT_EQ(planar.page_scales_bytes, 8);
  EXPECT_EQ(KvPageBytes(planar, planar.row_bytes, 64), 37440);
  std::vector<std::byte> page(37440);
  const auto place = KvRowIn(planar, page.data(), planar.row_bytes, 64, 3);
  EXPECT_EQ(place.row - page.data(), 3 * 576);
  EXPECT_EQ(place.scales - page.data(), 64 * 576 + 3 * 8);
}

TEST(KvRowLayoutTest, OddSizesKeepPartsApartAndAligned) {
  for (const int32_t latent : {1, 2, 127, 128, 129, 300}) {
    for (const int32_t rope : {0, 1, 7}) {
      const KvRowLayout layout = MakeKvRowLayout(KvFormat::kFp8Row, latent, rope);
      EXPECT_EQ(layout.groups, (latent + 127) / 128);
      EXPECT_EQ(layout.scales_at % 4, 0);
      EXPECT_GE(layout.scales_at, latent);
      EXPECT_GE(layout.rope_at, layout.scales_at + 4 * layout.groups);
      EXPECT_EQ(layout.row_bytes % 4, 0);
      EXPECT_GE(layout.row_bytes, layout.rope_at + 2 * rope);
    }
  }
}

TEST(KvRowLayoutTest, NamesDiffer) {
  EXPECT_STREQ(Name(KvFormat::kBf16), "bf16");
  EXPECT_STREQ(Name(KvFormat::kFp8Tensor), "fp8_tensor");
  EXPECT_STREQ(Name(KvFormat::kFp8Row), "fp8_row");
  EXPECT_STREQ(Name(KvFormat::kFp8Page), "fp8_page");
}

// Checks every magnitude that a row can hold.
TEST(KvGroupScaleTest, IsTheSmallestPowerOfTwoThatDoesNotSaturate) {
  for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
    const float factor = kind == Fp8Kind::kE4m3Fn ? 1.0f : 2.0f;
    for (uint32_t bits = 0; bits < kStoredBound; ++bits) {
      const float largest = ToFloat(static_cast<Bf16>(bits));
      const float scale = KvGroupScale(largest, kind);
      int exponent = 0;
      ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << largest;
      ASSERT_LE(largest, Fp8Largest(kind) * scale);
      if (scale > kSmallestKvScale * factor) {
        ASSERT_GT(largest, Fp8Largest(kind) * scale / 2);
      }
      ASSERT_LE(scale, kLargestKvScale * factor);
      ASSERT_EQ(scale * KvScaleInverse(scale), 1.0f);
      ASSERT_EQ(KvScale(scale, kind), scale);
    }
  }
}

TEST(KvSharedScaleTest, IsTheLargestScaleWhereTheLeastIsWithinTheRange) {
  for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
    // 1.75 is the mantissa of the largest code, so these scales differ only by their exponents.
    EXPECT_EQ(KvSharedScale(1.75f, 1.75f, kind), KvGroupScale(1.75f, kind));
    EXPECT_EQ(KvSharedScale(1.75f, 28.0f, kind), KvGroupScale(28.0f, kind));
    EXPECT_EQ(KvSharedScale(1.75f, 28.1f, kind), 0.0f);
    EXPECT_EQ(KvSharedScale(1.76f, 28.1f, kind), KvGroupScale(28.1f, kind));
    EXPECT_EQ(KvSharedScale(1e-30f, 1.0f, kind), 0.0f);
    // Below the smallest scale all scales are equal. The same holds for a row whose groups are all
    // zeros.
    EXPECT_EQ(KvSharedScale(1e-38f, 1e-33f, kind), KvGroupScale(0.0f, kind));
    EXPECT_EQ(KvSharedScale(kNoKvGroup, 0.0f, kind), KvGroupScale(0.0f, kind));
    EXPECT_EQ(KvSharedScale(0x1.fcp79f, 0x1.fcp79f, kind), KvGroupScale(0x1.fcp79f, kind));
  }
}

TEST(KvScaleTest, WhatIsNoScaleReadsAsNaN) {
  for (const float scale : {-1.0f, -0.0f, kNaN, kInfinity, -kInfinity, 0x1p80f, 3e38f}) {
    EXPECT_TRUE(std::isnan(KvScale(scale, Fp8Kind::kE4m3Fn))) << scale;
  }
  for (const float scale : {0.0f, 1e-45f, 1.0f, kLargestKvScale}) {
    EXPECT_EQ(KvScale(scale, Fp8Kind::kE4m3Fn), scale);
  }
  EXPECT_TRUE(std::isnan(KvScale(std::nextafterf(kLargestKvScale, kInfinity), Fp8Kind::kE4m3Fn)));
}

TEST(IsPoisonTest, AgreesWithWhatBf16RowsHold) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<Bf16>(bits);
    const bool want = Stored(value) != value || std::isnan(ToFloat(value));
    ASSERT_EQ(IsPoison(ToFloat(value)), want) << bits;
  }
  for (const float value : {0x1.fdp79f, 0x1.fep79f, 0x1.fefffep79f, 0x1.ffp79f, 0x1.fffffep79f}) {
    EXPECT_EQ(IsPoison(value), std::isnan(ToFloat(Stored(ToBf16(value))))) << value;
  }
}

class KvRowTest : public testing::TestWithParam<std::tuple<KvFormat, Fp8Kind, DType>> {
 protected:
  static KvFormatTraits Traits() { return TraitsOf(std::get<0>(GetParam())); }
  static Fp8Kind Kind() { return std::get<1>(GetParam()); }
  static DType Source() { return std::get<2>(GetParam()); }

  // Stores a row, reads it back, and checks that nothing else of the page was written.
  static std::vector<float> Through(const KvRowLayout& layout, const std::vector<float>& values,
                                    float layer_scale) {
    constexpr int32_t kRows = 3, kAt = 1;
    const int64_t stride = layout.row_bytes + 8;
    std::vector<std::byte> page(static_cast<size_t>(KvPageBytes(layout, stride, kRows)),
                                kUntouched);
    const KvRowPlace<std::byte> place = KvRowIn(layout, page.data(), stride, kRows, kAt);
    std::vector<Bf16> narrow(values.size());
    std::transform(values.begin(), values.end(), narrow.begin(), ToBf16);
    const void* const source = Source() == DType::kBf16 ? static_cast<const void*>(narrow.data())
                                                        : static_cast<const void*>(values.data());
    EncodeKvRow(layout, Kind(), source, Source(), layer_scale, place);
    for (size_t i = 0; i < page.size(); ++i) {
      const std::byte* const byte = page.data() + i;
      const bool in_row = byte >= place.row && byte < place.row + layout.row_bytes;
      const bool in_scales = layout.page_scales_bytes > 0 && byte >= place.scales &&
                             byte < place.scales + layout.page_scales_bytes;
      if (in_row || in_scales) continue;
      EXPECT_EQ(*byte, kUntouched) << i;
    }
    std::vector<float> read(values.size());
    const std::byte* const first = page.data();
    const KvRowPlace<const std::byte> there = KvRowIn(layout, first, stride, kRows, kAt);
    DecodeKvRow(layout, Kind(), layer_scale, there, read.data());
    EXPECT_TRUE(SameKvRow(layout, there, there));
    return read;
  }
};

TEST_P(KvRowTest, ValuesComeBackWithinTheRoundingOfTheirFormat) {
  std::mt19937 random(7);
  for (const int32_t latent : {1, 64, 130, 448, 512}) {
    const KvRowLayout layout = MakeKvRowLayout(Traits(), latent, 6);
    std::vector<float> values(static_cast<size_t>(latent) + 6);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (float& value : values) value = normal(random);
    const bool ocp = Kind() == Fp8Kind::kE4m3Fn;
    const float scale = ocp ? 0.0371f : ScaleToKind(0.0371f, Fp8Kind::kE4m3Fnuz);
    const std::vector<float> read = Through(layout, values, scale);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool fp8 = i < static_cast<size_t>(latent) ? layout.traits.latent == DType::kFp8E4m3
                                                       : layout.traits.rope == DType::kFp8E4m3;
      const float error = std::abs(read[i] - values[i]);
      // Three mantissa bits or seven; below the smallest normal number of a scale, an absolute
      // error.
      const float bound = fp8 ? std::abs(values[i]) * 0.0665f + 1e-3f : std::abs(values[i]) / 250;
      ASSERT_LE(error, bound) << values[i] << " at " << i << " of " << latent;
    }
  }
}

TEST_P(KvRowTest, ZeroRowsAreZeros) {
  const KvRowLayout at = MakeKvRowLayout(Traits(), 200, 4);
  for (const float zero : {0.0f, -0.0f}) {
    const std::vector<float> read = Through(at, std::vector<float>(204, zero), 1.0f);
    for (const float value : read) ASSERT_EQ(value, 0.0f);
  }
}

TEST_P(KvRowTest, WhatARowCannotHoldIsNaNAndHarmsNoNeighbour) {
  const KvRowLayout layout = MakeKvRowLayout(Traits(), 200, 4);
  const std::vector<float> clean(204, 0.75f);
  const std::vector<float> want = Through(layout, clean, 0.01f);
  for (const float poison : {kNaN, -kNaN, kInfinity, -kInfinity, 0x1p80f, -3e38f}) {
    for (const size_t where : {size_t{0}, size_t{150}, size_t{199}, size_t{200}, size_t{203}}) {
      std::vector<float> values = clean;
      values[where] = poison;
      const std::vector<float> read = Through(layout, values, 0.01f);
      for (size_t i = 0; i < values.size(); ++i) {
        if (i == where) {
          ASSERT_TRUE(std::isnan(read[i])) << poison << " at " << i;
        } else {
          ASSERT_EQ(read[i], want[i]) << poison << " at " << where;
        }
      }
    }
  }
}

TEST_P(KvRowTest, LargestAndSmallestMagnitudesStayInRange) {
  const KvRowLayout layout = MakeKvRowLayout(Traits(), 256, 2);
  std::vector<float> values(258, 0.0f);
  values[0] = 0x1.fcp79f;
  values[1] = -0x1.fcp79f;
  values[130] = 1e-38f;
  values[256] = 0x1.fcp79f;
  const std::vector<float> read = Through(layout, values, kLargestKvScale / 2);
  for (const float value : read) {
    ASSERT_TRUE(std::isfinite(value));
    ASSERT_LT(std::abs(value), 0x1p81f);
  }
  EXPECT_GT(read[0], 0x1p78f);
  EXPECT_LT(read[1], -0x1p78f);
}

// A row of groups of normal numbers times 2^-binades[group]. The first of each group is the
// largest, 7 times the factor.
class SharedScaleTest : public KvRowTest {
 protected:
  static std::vector<float> Row(const std::vector<int>& binades) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    std::vector<float> values;
    for (const int binade : binades) {
      for (int32_t i = 0; i < 128; ++i) {
        const float wide = normal(random) * std::ldexp(1.0f, -(i % 16));
        values.push_back(std::ldexp(i == 0 ? 7.0f : wide, -binade));
      }
    }
    values.resize(values.size() + 4, 0.25f);
    return values;
  }
  static std::vector<float> Scales(const std::vector<float>& values) {
    const KvRowLayout layout =
        MakeKvRowLayout(Traits(), static_cast<int32_t>(values.size()) - 4, 4);
    std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes));
    const KvRowPlace<std::byte> place = KvRowIn(layout, row.data(), layout.row_bytes, 1, 0);
    EncodeKvRow(layout, Kind(), values.data(), DType::kF32, 1.0f, place);
    std::vector<float> scales(static_cast<size_t>(layout.groups));
    std::memcpy(scales.data(), place.scales, scales.size() * 4);
    return scales;
  }
  static float Own(int binade) { return KvGroupScale(std::ldexp(7.0f, -binade), Kind()); }
  // Checks the errors of a row's values. Values of at least 2^-`normal` of their group's largest
  // have a relative bound. Smaller values may err by `below` times the largest.
  static void ExpectErrors(const std::vector<int>& binades, int normal, float below) {
    const std::vector<float> values = Row(binades);
    const int32_t latent = static_cast<int32_t>(values.size()) - 4;
    const std::vector<float> read = Through(MakeKvRowLayout(Traits(), latent, 4), values, 1.0f);
    // Values sent as bf16 are rounded before they are encoded.
    const float sent = Source() == DType::kBf16 ? 0x1p-8f : 0.0f;
    for (size_t i = 0; i < static_cast<size_t>(latent); ++i) {
      const float largest = values[i / 128 * 128], size = std::abs(values[i]);
      const float bound = size >= std::ldexp(largest, -normal) ? size / 16 : largest * below;
      ASSERT_LE(std::abs(read[i] - values[i]), bound + size * sent) << values[i] << " at " << i;
    }
  }
};

TEST_P(SharedScaleTest, GroupsWithinTheRangeHaveTheLargestOfTheirScales) {
  EXPECT_EQ(Scales(Row({0, 4, 1, 3})), std::vector<float>(4, Own(0)));
  EXPECT_EQ(Scales(Row({4, 2, 2, 0})), std::vector<float>(4, Own(0)));
  EXPECT_EQ(Scales(Row({0, 5, 1, 3})), (std::vector<float>{Own(0), Own(5), Own(1), Own(3)}));
  EXPECT_EQ(Scales(Row({9, 9, 9, 0})), (std::vector<float>{Own(9), Own(9), Own(9), Own(0)}));
  EXPECT_EQ(Scales(Row({30})), std::vector<float>(1, Own(30)));
}

TEST_P(SharedScaleTest, GroupsOfZerosAndWhatARowCannotHoldTakeTheScaleOfTheOthers) {
  std::vector<float> values = Row({0, 1, 2, 3});
  std::fill_n(values.begin() + 128, 128, 0.0f);
  std::fill_n(values.begin() + 256, 128, kInfinity);
  EXPECT_EQ(Scales(values), std::vector<float>(4, Own(0)));
  std::fill_n(values.begin(), values.size(), 0.0f);
  EXPECT_EQ(Scales(values), std::vector<float>(4, KvGroupScale(0.0f, Kind())));
}

TEST_P(SharedScaleTest, ErrorsAreWithinWhatTheManualSays) {
  ExpectErrors({0, 4, 2, 3}, 9, 0x1p-13f);
  ExpectErrors({0, 5, 2, 9}, 13, 0x1p-17f);
}

INSTANTIATE_TEST_SUITE_P(Formats, SharedScaleTest,
                         testing::Combine(testing::Values(KvFormat::kFp8Row),
                                          testing::Values(Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz),
                                          testing::Values(DType::kBf16, DType::kF32)),
                         [](const auto& info) {
                           return std::string(Name(std::get<1>(info.param))) + "_" +
                                  Name(std::get<2>(info.param));
                         });

std::string NameOf(const testing::TestParamInfo<std::tuple<KvFormat, Fp8Kind, DType>>& info) {
  const auto [format, kind, source] = info.param;
  return std::string(Name(format)) + "_" + Name(kind) + "_" + Name(source);
}

INSTANTIATE_TEST_SUITE_P(Formats, KvRowTest,
                         testing::Combine(testing::ValuesIn(kKvFormats),
                                          testing::Values(Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz),
                                          testing::Values(DType::kBf16, DType::kF32)),
                         NameOf);

// Reads bytes that no encoder of this tree writes.
TEST(DecodeKvRowTest, ForeignScalesAreRoundedOnceAndBadOnesAreNaN) {
  const KvRowLayout layout = MakeKvRowLayout(KvFormat::kFp8Row, 256, 0);
  std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes), std::byte{0x43});
  const KvRowPlace<std::byte> place = KvRowIn(layout, row.data(), layout.row_bytes, 1, 0);
  const std::byte* const first = row.data();
  const KvRowPlace<const std::byte> there = KvRowIn(layout, first, layout.row_bytes, 1, 0);
  std::vector<float> values(256);
  const float code = DecodeFp8(0x43, Fp8Kind::kE4m3Fn);
  for (const float scale : {0.3f, 0.0f, 1e-40f, kLargestKvScale, -1.0f, kNaN, kInfinity, 1e30f}) {
    const float scales[2] = {scale, 1.0f};
    std::memcpy(place.scales, scales, sizeof scales);
    DecodeKvRow(layout, Fp8Kind::kE4m3Fn, 0.0f, there, values.data());
    const float want = ToFloat(ToBf16(code * KvScale(scale, Fp8Kind::kE4m3Fn)));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[0])) << scale;
    } else {
      EXPECT_EQ(values[0], want) << scale;
    }
    EXPECT_EQ(values[128], code);
  }
}

// The layout of DeepSeek V4's blocks: the byte of a scale is the exponent of a power of two.
TEST(DecodeKvRowTest, ScalesOfAPageAreExponents) {
  const KvRowLayout layout = MakeKvRowLayout(KvFormat::kFp8Page, 448, 64);
  constexpr int32_t kRows = 4, kRow = 2;
  std::vector<std::byte> page(static_cast<size_t>(KvPageBytes(layout, layout.row_bytes, kRows)));
  ASSERT_EQ(page.size(), 2880u);  // 4 rows of 576 bytes and of 8 scales are 2336
  const int32_t exponents[] = {127, 0, 1, 27, 120, 199, 255};
  for (int32_t i = 0; i < 448; ++i) page[size_t{kRow} * 576 + i] = std::byte{0x43};
  for (int32_t group = 0; group < 7; ++group) {
    page[size_t{kRows} * 576 + kRow * 8 + group] = static_cast<std::byte>(exponents[group]);
  }
  const Bf16 rotated = ToBf16(-3.0f);
  std::memcpy(&page[size_t{kRow} * 576 + 448], &rotated, sizeof rotated);
  const std::byte* const first = page.data();
  for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
    std::vector<float> values(512);
    DecodeKvRow(layout, kind, 0.0f, KvRowIn(layout, first, layout.row_bytes, kRows, kRow),
                values.data());
    const float code = DecodeFp8(0x43, kind);
    for (int32_t group = 0; group < 6; ++group) {
      EXPECT_EQ(values[size_t{64} * group], std::ldexp(code, exponents[group] - 127)) << group;
      EXPECT_EQ(values[size_t{64} * group + 63], values[size_t{64} * group]) << group;
    }
    EXPECT_TRUE(std::isnan(values[447])) << "no exponent";
    EXPECT_EQ(values[448], -3.0f);
  }
}

TEST(SameKvRowTest, SeesEveryBytePartAndNoPadding) {
  for (const KvFormatTraits& traits :
       {TraitsOf(KvFormat::kFp8Row), TraitsOf(KvFormat::kBf16), TraitsOf(KvFormat::kFp8Tensor)}) {
    const KvRowLayout layout = MakeKvRowLayout(traits, 130, 3);
    std::vector<std::byte> a(static_cast<size_t>(layout.row_bytes), std::byte{1}), b = a;
    const std::byte *first = a.data(), *second = b.data();
    int32_t differences = 0;
    for (std::byte& byte : b) {
      byte = std::byte{2};
      differences += !SameKvRow(layout, KvRowIn(layout, first, layout.row_bytes, 1, 0),
                                KvRowIn(layout, second, layout.row_bytes, 1, 0));
      byte = std::byte{1};
    }
    const int32_t want = traits.scales == KvScales::kNone    ? 2 * 133
                         : traits.scales == KvScales::kLayer ? 133
                                                             : 130 + 2 * 4 + 3 * 2;
    EXPECT_EQ(differences, want) << traits.name;
  }
}

}  // namespace
}  // namespace mla::kernels
