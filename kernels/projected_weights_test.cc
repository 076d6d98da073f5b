#include "kernels/projected_weights.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

constexpr Geometry kV3{128, 512, 64, 128, 128};
constexpr ProjectedShape kV3Codes{1536, 7168, DType::kFp8E4m3};

TEST(ProjectedWeightsTest, ALayerOfDeepSeekV3TakesHalfOfTheBytesInE4m3) {
  EXPECT_EQ(ProjectedBytes(kV3, {1536, 7168}), 310378496);
  // The codes, 384 x 12 scales of W_UQ and 56 x 128 of W_O.
  EXPECT_EQ(ProjectedBytes(kV3, kV3Codes), 310378496 / 2 + 384 * 12 * 4 + 56 * 128 * 4);
  EXPECT_EQ(ProjectedBytes(kV3, {}), 0);
}

TEST(ProjectedWeightsTest, NoScaleServesTwoHeads) {
  const ProjectedMatrix queries = MatrixOf(kV3, kV3Codes, ProjectedPart::kQueries);
  EXPECT_EQ(queries.scale_rows, 64);  // heads of 192 rows, blocks of 128
  EXPECT_EQ(queries.scale_depth, 128);
  EXPECT_EQ(queries.scale_pitch, 12);
  const ProjectedMatrix outputs = MatrixOf(kV3, kV3Codes, ProjectedPart::kOutputs);
  EXPECT_EQ(outputs.scale_rows, 128);
  EXPECT_EQ(outputs.scale_depth, 128);
  EXPECT_EQ(outputs.scale_pitch, 128);
  const Geometry odd{3, 512, 16, 32, 192};
  EXPECT_EQ(MatrixOf(odd, {100, 130, DType::kFp8E4m3}, ProjectedPart::kQueries).scale_rows, 16);
  EXPECT_EQ(MatrixOf(odd, {100, 130, DType::kFp8E4m3}, ProjectedPart::kOutputs).scale_depth, 64);
}

TEST(ProjectedWeightsTest, BytesAreAMultipleOf128) {
  for (int32_t hidden = 1; hidden < 300; hidden += 7) {
    for (const DType dtype : {DType::kBf16, DType::kFp8E4m3}) {
      const Geometry g{3, 512, 16, 32, 64};
      for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
        const ProjectedMatrix m = MatrixOf(g, {hidden, hidden, dtype}, part);
        EXPECT_EQ(m.bytes() % 128, 0);
        int64_t scales = 0;
        if (dtype == DType::kFp8E4m3) {
          scales = (m.rows + m.scale_rows - 1) / m.scale_rows * int64_t{m.scale_pitch};
        }
        EXPECT_GE(m.bytes(), m.weight_bytes() + scales * int64_t{sizeof(float)});
      }
    }
  }
}

TEST(ProjectedWeightsTest, WindowsHaveTheBlocksThatTheyTouch) {
  const WeightWindow second = WindowOf(kV3, kV3Codes, ProjectedPart::kQueries, 1, 1);
  EXPECT_EQ(second.row, 192);
  EXPECT_EQ(second.block_rows(), 2);  // 128 to 255, and 256 to 383
  EXPECT_EQ(second.block_columns(), 12);
  EXPECT_EQ(second.BlockOf(63, 0), 0);
  EXPECT_EQ(second.BlockOf(64, 1535), 23);
  EXPECT_EQ(second.Bytes(DType::kFp8E4m3), 192 * 1536 + 24 * 4);
  EXPECT_EQ(second.Bytes(DType::kBf16), 192 * 1536 * 2);
  const WeightWindow columns = WindowOf(kV3, kV3Codes, ProjectedPart::kOutputs, 2, 3);
  EXPECT_EQ(columns.column, 256);
  EXPECT_EQ(columns.block_columns(), 3);
  EXPECT_EQ(columns.block_rows(), 56);
}

TEST(ProjectedWeightsTest, HeadsThatScalesCannotFollowAreNotHeldInE4m3) {
  EXPECT_TRUE(CanHoldCodes(kV3));
  EXPECT_TRUE(CanHoldCodes({16, 512, 64, 192, 256}));
  EXPECT_FALSE(CanHoldCodes({3, 512, 10, 23, 64}));
  EXPECT_FALSE(CanHoldCodes({3, 512, 64, 128, 32}));
}

TEST(ProjectedWeightsTest, AWeightIsItsCodeTimesItsScaleRounded) {
  EXPECT_EQ(WidenedWeight(0x38, 1.0f), ToBf16(1.0f));
  EXPECT_EQ(WidenedWeight(0xb9, 0.3f), ToBf16(-1.125f * 0.3f));
  EXPECT_TRUE(std::isnan(ToFloat(WidenedWeight(0x7f, 1.0f))));
  const WeightWindow window{100, 30, 0, 1};  // two blocks
  std::vector<unsigned char> bytes(30 + 8);
  const float scales[] = {0.5f, 2.0f};
  std::memcpy(&bytes[30], scales, sizeof(scales));
  EXPECT_EQ(ScaleOf(window, bytes.data(), window.BlockOf(27, 0)), 0.5f);
  EXPECT_EQ(ScaleOf(window, bytes.data(), window.BlockOf(28, 0)), 2.0f);
}

}  // namespace
}  // namespace mla::kernels
