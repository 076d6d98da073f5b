#include "client/mlactl/load/arrivals.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace mla::mlactl {
namespace {

using Clock = Arrivals::Clock;

std::vector<double> SecondsOf(ArrivalKind kind, double rate, uint64_t seed, int seconds) {
  const Clock::time_point begin = Clock::now();
  Arrivals arrivals(kind, rate, seed, begin);
  std::vector<double> taken;
  while (true) {
    const auto next = arrivals.TakeBefore(begin + std::chrono::seconds(seconds));
    if (!next.has_value()) break;
    taken.push_back(std::chrono::duration<double>(*next - begin).count());
  }
  return taken;
}

TEST(ArrivalsTest, UniformGapsAreEqual) {
  const auto taken = SecondsOf(ArrivalKind::kUniform, 1000, 1, 3);
  ASSERT_NEAR(static_cast<double>(taken.size()), 2999, 1);
  for (size_t i = 0; i < taken.size(); ++i) {
    ASSERT_NEAR(taken[i], static_cast<double>(i + 1) / 1000, 1e-6);
  }
}

// Mean and deviation of exponential gaps are both 1 / rate; a third of the gaps is longer.
TEST(ArrivalsTest, PoissonGapsAreExponential) {
  const auto taken = SecondsOf(ArrivalKind::kPoisson, 500, 42, 100);
  EXPECT_NEAR(static_cast<double>(taken.size()), 50000, 4 * std::sqrt(50000));
  double sum = 0, squares = 0, last = 0;
  int longer = 0;
  for (const double at : taken) {
    const double gap = at - last;
    last = at;
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
    longer += gap > 1.0 / 500;
  }
  const auto n = static_cast<double>(taken.size());
  EXPECT_NEAR(std::sqrt(squares / n - sum / n * sum / n) * 500, 1.0, 0.03);
  EXPECT_NEAR(longer / n, std::exp(-1), 0.01);
}

TEST(ArrivalsTest, SeedsDecide) {
  EXPECT_EQ(SecondsOf(ArrivalKind::kPoisson, 50, 3, 2), SecondsOf(ArrivalKind::kPoisson, 50, 3, 2));
  EXPECT_NE(SecondsOf(ArrivalKind::kPoisson, 50, 3, 2), SecondsOf(ArrivalKind::kPoisson, 50, 4, 2));
}

TEST(ArrivalsTest, WhatLiesBehindTheEndStays) {
  const Clock::time_point begin = Clock::now();
  Arrivals arrivals(ArrivalKind::kUniform, 10, 1, begin);
  EXPECT_FALSE(arrivals.TakeBefore(begin + std::chrono::milliseconds(50)));
  const auto next = arrivals.TakeBefore(begin + std::chrono::milliseconds(150));
  EXPECT_NEAR(std::chrono::duration<double>(next.value_or(begin) - begin).count(), 0.1, 1e-6);
}

}  // namespace
}  // namespace mla::mlactl
