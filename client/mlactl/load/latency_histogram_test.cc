#include "client/mlactl/load/latency_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace mla::mlactl {
namespace {

TEST(LatencyHistogramTest, EmptyHasNothing) {
  const LatencyHistogram empty;
  EXPECT_EQ(empty.count(), 0u);
  EXPECT_EQ(empty.ValueAt(0.5), 0);
  EXPECT_EQ(empty.mean_ns(), 0);
  EXPECT_TRUE(empty.Curve().empty());
}

TEST(LatencyHistogramTest, SmallValuesAreExact) {
  LatencyHistogram histogram;
  for (int i = 1; i <= 100; ++i) histogram.Record(i);
  EXPECT_EQ(histogram.ValueAt(0.5), 50);
  EXPECT_EQ(histogram.ValueAt(0.99), 99);
  EXPECT_EQ(histogram.ValueAt(0.0), 1);
  EXPECT_EQ(histogram.ValueAt(1.0), 100);
  EXPECT_EQ(histogram.min_ns(), 1);
  EXPECT_EQ(histogram.mean_ns(), 50.5);
}

TEST(LatencyHistogramTest, EveryMagnitudeIsWithinItsError) {
  for (int64_t value = 1; value < int64_t{1} << 41; value = value * 5 / 4 + 1) {
    LatencyHistogram histogram;
    histogram.Record(value);
    histogram.Record(int64_t{1} << 41);
    const int64_t seen = histogram.ValueAt(0.5);
    EXPECT_GE(seen, value);
    EXPECT_LE(static_cast<double>(seen), static_cast<double>(value) * (1 + 1.0 / 256));
  }
}

TEST(LatencyHistogramTest, ExtremesStayInside) {
  LatencyHistogram histogram;
  histogram.Record(-5);
  histogram.Record(INT64_MAX);
  EXPECT_EQ(histogram.count(), 2u);
  EXPECT_EQ(histogram.min_ns(), 0);
  EXPECT_EQ(histogram.max_ns(), INT64_MAX);
  EXPECT_EQ(histogram.ValueAt(0.5), 0);
  EXPECT_EQ(histogram.ValueAt(1), (int64_t{1} << 42) - 1);
}

// Compares quantiles of a skewed distribution with quantiles of the sorted samples.
TEST(LatencyHistogramTest, QuantilesEqualThoseOfSortedSamples) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> micros(5, 1.5);
  std::vector<int64_t> samples;
  LatencyHistogram one, other;
  for (int i = 0; i < 100000; ++i) {
    samples.push_back(static_cast<int64_t>(1000 * micros(random)));
    (i % 3 == 0 ? one : other).Record(samples.back());
  }
  one.Merge(other);
  std::sort(samples.begin(), samples.end());
  for (const double quantile : {0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999}) {
    const auto rank = static_cast<size_t>(std::ceil(quantile * 100000)) - 1;
    const auto expected = static_cast<double>(samples[rank]);
    EXPECT_NEAR(static_cast<double>(one.ValueAt(quantile)), expected, expected / 200) << quantile;
  }
  EXPECT_EQ(one.max_ns(), samples.back());
  EXPECT_EQ(one.min_ns(), samples.front());
}

TEST(LatencyHistogramTest, CurveRisesToTheLargestSample) {
  LatencyHistogram histogram;
  for (int i = 1; i <= 1000; ++i) histogram.Record(i * 1000);
  const auto curve = histogram.Curve();
  ASSERT_GT(curve.size(), 40u);
  EXPECT_EQ(curve.front().first, 0.0);
  EXPECT_EQ(curve.front().second, 1000);
  EXPECT_EQ(curve.back(), std::make_pair(1.0, int64_t{1000000}));
  EXPECT_TRUE(std::is_sorted(curve.begin(), curve.end()));
  EXPECT_LT(curve[curve.size() - 2].first, 1.0);
}

TEST(LatencyHistogramTest, ClearForgets) {
  LatencyHistogram histogram;
  histogram.Record(5);
  histogram.Clear();
  histogram.Record(9);
  EXPECT_EQ(histogram.count(), 1u);
  EXPECT_EQ(histogram.ValueAt(0), 9);
  EXPECT_EQ(histogram.min_ns(), 9);
}

}  // namespace
}  // namespace mla::mlactl
