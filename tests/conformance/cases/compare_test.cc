#include "tests/conformance/cases/compare.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace mla::conformance {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(CompareTest, EqualValuesAndEqualSpecialsPass) {
  const std::vector<float> values = {1.0f, kNan, kInf, -kInf, 0.0f, -2.0f};
  const Comparison result = Compare(values, values, 3, {0.0, 0.0, 1e-9});
  EXPECT_TRUE(result.equal) << result.message;
  EXPECT_EQ(result.worst_abs, 0.0);
}

TEST(CompareTest, SpecialsMustMatchByPosition) {
  for (const float got : {1.0f, kInf, -kInf, kNan}) {
    for (const float want : {1.0f, kInf, -kInf, kNan}) {
      const bool same = (std::isnan(got) && std::isnan(want)) || got == want;
      const std::vector<float> g = {0.0f, got}, w = {0.0f, want};
      const Comparison result = Compare(g, w, 1, {10.0, 10.0, 1.0});
      EXPECT_EQ(result.equal, same) << got << " " << want;
      if (same) continue;
      EXPECT_NE(result.message.find("row 1"), std::string::npos) << result.message;
    }
  }
}

TEST(CompareTest, WorstElementIsNamedByCoordinates) {
  const std::vector<float> want = {1, 1, 1, 1, 1, 1}, got = {1, 1.01f, 1, 1, 1.5f, 1};
  const Comparison result = Compare(got, want, 2, {1e-3, 1e-3, 1.0});
  EXPECT_FALSE(result.equal);
  EXPECT_NE(result.message.find("2 of 6"), std::string::npos) << result.message;
  EXPECT_NE(result.message.find("[row 2, column 0]"), std::string::npos) << result.message;
}

TEST(CompareTest, AbsoluteOrRelativeSuffices) {
  EXPECT_TRUE(
      Compare(std::vector<float>{100.5f}, std::vector<float>{100.0f}, 1, {0.0, 0.01, 1.0}).equal);
  EXPECT_TRUE(
      Compare(std::vector<float>{0.001f}, std::vector<float>{0.0f}, 1, {0.01, 0.0, 1.0}).equal);
  EXPECT_FALSE(
      Compare(std::vector<float>{0.1f}, std::vector<float>{0.0f}, 1, {0.01, 0.01, 1.0}).equal);
}

TEST(CompareTest, CosineCatchesABiasThatElementsHide) {
  std::vector<float> want(100, 1.0f), got(100);
  for (size_t i = 0; i < got.size(); ++i) got[i] = i % 2 == 0 ? 1.01f : 0.99f;
  EXPECT_TRUE(Compare(got, want, 10, {0.02, 0.0, 1.0}).equal);
  EXPECT_FALSE(Compare(got, want, 10, {0.02, 0.0, 1e-5}).equal);
}

TEST(CompareTest, NormsCountAsAtLeastTheFloor) {
  const std::vector<float> want = {1e-4f}, got = {1.01e-4f};
  EXPECT_FALSE(Compare(got, want, 1, {1.0, 0.0, 1e-5}).equal);
  EXPECT_TRUE(Compare(got, want, 1, {1.0, 0.0, 1e-5, 1e-6}).equal);
  EXPECT_FALSE(Compare(got, want, 1, {1.0, 0.0, 1e-5, 1e-8}).equal);
}

TEST(CompareTest, SizesMustAgree) {
  EXPECT_FALSE(Compare(std::vector<float>{1, 2}, std::vector<float>{1}, 1, {1, 1, 1}).equal);
}

}  // namespace
}  // namespace mla::conformance
