#include "base/pauses/nap.h"

#include <sys/prctl.h>

#include <thread>

#include "gtest/gtest.h"

namespace mla {
namespace {

TEST(NapTest, IsAnEighthOfTheWaitWithinItsBounds) {
  EXPECT_EQ(NapNanos(0), 5'000);
  EXPECT_EQ(NapNanos(40'000), 5'000);
  EXPECT_EQ(NapNanos(80'000), 10'000);
  EXPECT_EQ(NapNanos(400'000), 50'000);
  EXPECT_EQ(NapNanos(100'000'000'000), 50'000);
}

TEST(NapTest, AsksForSleepsThatEndOnTime) {
  int before = 0, after = 0;
  std::thread([&] {
    before = prctl(PR_GET_TIMERSLACK);
    Nap(std::chrono::nanoseconds(0));
    after = prctl(PR_GET_TIMERSLACK);
  }).join();
  EXPECT_GT(before, 1);
  EXPECT_EQ(after, 1);
}

TEST(NapTest, SleepsAtLeastAsLongAsItSays) {
  const auto begin = std::chrono::steady_clock::now();
  Nap(std::chrono::microseconds(400));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::microseconds(50));
}

}  // namespace
}  // namespace mla
