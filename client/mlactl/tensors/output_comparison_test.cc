#include "client/mlactl/tensors/output_comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace mla::mlactl {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

OutputComparison Compared(const std::vector<float>& got, const std::vector<float>& want,
                          double max_v) {
  OutputComparison comparison{OutputRule{}};
  comparison.AddRow(got, want, max_v, "row");
  return comparison;
}

TEST(OutputComparisonTest, EqualRowsAgree) {
  const std::vector<float> row = {1, -2, 0, 1e-30F};
  const OutputComparison same = Compared(row, row, 2);
  EXPECT_TRUE(same.agrees());
  EXPECT_EQ(same.elements(), 4u);
  EXPECT_EQ(same.rows(), 1u);
  EXPECT_EQ(same.abs().value, 0);
  EXPECT_EQ(same.of_allowed().value, 0);
  EXPECT_EQ(same.abs().where, "row");
}

// Each bound just inside and just outside, while the other bounds hold.
TEST(OutputComparisonTest, BoundsAreWhereTheRuleSays) {
  std::vector<float> want(1000, 1.0F), got = want;
  got[7] = 1.0F + 0.0159F;  // relative
  EXPECT_TRUE(Compared(got, want, 0.1).agrees());
  got[7] = 1.0F + 0.0161F;
  EXPECT_FALSE(Compared(got, want, 0.1).agrees());
  got = want;
  want[7] = 0;
  got[7] = 0.0199F;  // absolute, of max |V| = 10
  EXPECT_TRUE(Compared(got, want, 10).agrees());
  EXPECT_NEAR(Compared(got, want, 10).of_allowed().value, 0.995, 1e-3);
  EXPECT_NEAR(Compared(got, want, 10).abs_of_v().value, 1.99e-3, 1e-6);
  got[7] = 0.0201F;
  const OutputComparison outside = Compared(got, want, 10);
  EXPECT_FALSE(outside.agrees());
  EXPECT_EQ(outside.outside(), 1u);
  EXPECT_THAT(outside.first_outside(), HasSubstr("row: element 7: got 0.0201, want 0"));
}

// Errors that each element's bound allows, but all in one direction.
TEST(OutputComparisonTest, CosineSeesWhatElementsHide) {
  std::vector<float> want(512), got(512);
  for (size_t i = 0; i < want.size(); ++i) {
    want[i] = i % 2 == 0 ? 1.0F : -1.0F;
    got[i] = want[i] + 0.015F;
  }
  const OutputComparison comparison = Compared(got, want, 1);
  EXPECT_LT(comparison.of_allowed().value, 1);
  EXPECT_NEAR(comparison.cosine().value, 0.015 * 0.015 / 2, 1e-6);
  EXPECT_FALSE(comparison.agrees());
  EXPECT_THAT(comparison.first_outside(), HasSubstr("cosine"));
  EXPECT_EQ(comparison.outside_cosines(), 1u);
  EXPECT_EQ(comparison.outside_elements(), 0u);
}

TEST(OutputComparisonTest, SpecialValuesMatchByPlace) {
  EXPECT_TRUE(Compared({kNan, kInf, -kInf, 1}, {kNan, kInf, -kInf, 1}, 1).agrees());
  EXPECT_FALSE(Compared({kInf}, {-kInf}, 1).agrees());
  EXPECT_FALSE(Compared({kNan}, {kInf}, 1).agrees());
  EXPECT_FALSE(Compared({kNan}, {1}, 1).agrees());
  EXPECT_FALSE(Compared({1}, {kNan}, 1).agrees());
  EXPECT_FALSE(Compared({1, 2}, {1}, 1).agrees());
}

TEST(OutputComparisonTest, ZeroRowsAllowNothingElse) {
  EXPECT_TRUE(Compared({0, 0}, {0, 0}, 0).agrees());
  EXPECT_FALSE(Compared({0, 1e-20F}, {0, 0}, 0).agrees());
}

TEST(OutputComparisonTest, LseIsAbsolute) {
  OutputComparison comparison{OutputRule{}};
  comparison.AddLse(100.0005F, 100, "a");
  comparison.AddLse(-kInf, -kInf, "b");
  EXPECT_TRUE(comparison.agrees());
  EXPECT_NEAR(comparison.lse().value, 5e-4, 1e-5);
  EXPECT_EQ(comparison.lse().where, "a");
  comparison.AddLse(100.002F, 100, "c");
  EXPECT_FALSE(comparison.agrees());
  EXPECT_THAT(comparison.first_outside(), HasSubstr("c: lse: got 100.002"));
  comparison.AddLse(-kInf, 3, "d");
  EXPECT_EQ(comparison.outside(), 2u);
  EXPECT_EQ(comparison.outside_lse(), 2u);
}

TEST(OutputComparisonTest, TheWorstIsKeptWithItsPlace) {
  OutputComparison comparison{OutputRule{}};
  comparison.AddRow(std::vector<float>{1.001F}, std::vector<float>{1}, 1, "first");
  comparison.AddRow(std::vector<float>{1.002F}, std::vector<float>{1}, 1, "second");
  comparison.AddRow(std::vector<float>{1}, std::vector<float>{1}, 1, "third");
  EXPECT_EQ(comparison.abs().where, "second");
  EXPECT_NEAR(comparison.abs().value, 2e-3, 1e-6);
  EXPECT_EQ(comparison.rows(), 3u);
}

}  // namespace
}  // namespace mla::mlactl
