// Tests when a relay counts its core as crowded, at times of the test's own.
#include "relay/crowding.h"

#include <chrono>

#include "gtest/gtest.h"

namespace mla::relay {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr nanoseconds kTick{1};

class CrowdingTest : public ::testing::Test {
 protected:
  // Yields for so long. Returns when that ended.
  Crowding::Time Yield(nanoseconds length) {
    const Crowding::Time begin = now_;
    now_ += length;
    crowding_.NoteYield(begin, now_);
    return now_;
  }

  Crowding crowding_;
  Crowding::Time now_{hours(1)};
};

TEST_F(CrowdingTest, CoreIsFreeAtFirst) {
  EXPECT_FALSE(crowding_.IsCrowded(now_));
  EXPECT_FALSE(crowding_.IsCrowded(Crowding::Time::min()));
  EXPECT_FALSE(crowding_.IsCrowded(Crowding::Time::max()));
}

TEST_F(CrowdingTest, OneYieldDecides) {
  Yield(Crowding::kLongYield - kTick);
  EXPECT_FALSE(crowding_.IsCrowded(now_));
  Yield(Crowding::kLongYield);
  EXPECT_TRUE(crowding_.IsCrowded(now_));
}

TEST_F(CrowdingTest, ShortYieldsDoNotAddUp) {
  for (int i = 0; i < 1000; ++i) {
    Yield(Crowding::kLongYield / 2);
    ASSERT_FALSE(crowding_.IsCrowded(now_)) << i;
  }
}

// The time from one yield to the next is spent on looks, which may wait for the other thread.
TEST_F(CrowdingTest, TimeBetweenYieldsDoesNotCount) {
  for (int i = 0; i < 100; ++i) {
    now_ += 20 * Crowding::kLongYield;
    Yield(microseconds(1));
    ASSERT_FALSE(crowding_.IsCrowded(now_)) << i;
  }
}

TEST_F(CrowdingTest, LastsForThePauseFromTheEndOfTheYield) {
  const Crowding::Time end = Yield(3 * Crowding::kLongYield);
  EXPECT_TRUE(crowding_.IsCrowded(end + Crowding::kPause - kTick));
  EXPECT_FALSE(crowding_.IsCrowded(end + Crowding::kPause));
}

TEST_F(CrowdingTest, ShortYieldsDoNotEndIt) {
  const Crowding::Time end = Yield(Crowding::kLongYield);
  Yield(microseconds(1));
  EXPECT_TRUE(crowding_.IsCrowded(end + Crowding::kPause - kTick));
  EXPECT_FALSE(crowding_.IsCrowded(end + Crowding::kPause));
}

TEST_F(CrowdingTest, LaterLongYieldsProlongIt) {
  Yield(Crowding::kLongYield);
  now_ += Crowding::kPause - kTick;
  const Crowding::Time end = Yield(Crowding::kLongYield);
  EXPECT_TRUE(crowding_.IsCrowded(end + Crowding::kPause - kTick));
  EXPECT_FALSE(crowding_.IsCrowded(end + Crowding::kPause));
}

}  // namespace
}  // namespace mla::relay
