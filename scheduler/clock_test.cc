#include "scheduler/clock.h"

#include <gtest/gtest.h>

namespace mla::scheduler {
namespace {

TEST(SimulatedClockTest, MovesOnlyWhenTold) {
  SimulatedClock clock(5);
  EXPECT_EQ(clock.Now(), 5);
  EXPECT_EQ(clock.Now(), 5);
  clock.Advance(7);
  EXPECT_EQ(clock.Now(), 12);
}

TEST(RealClockTest, NeverRunsBackwards) {
  const RealClock clock;
  MonotonicNanos last = clock.Now();
  for (int i = 0; i < 1000; ++i) {
    const MonotonicNanos now = clock.Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace mla::scheduler
