#include "base/pauses.h"

#include <sys/prctl.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "gtest/gtest.h"

namespace mla {
namespace {

class PauseWatchTest : public ::testing::Test {
 protected:
  std::atomic<int64_t> now_{1'000};
  PauseWatch watch_{[this] { return now_.load(); }};
};

TEST_F(PauseWatchTest, TimeThatIsNotedIsNoPause) {
  for (int i = 0; i < 100; ++i) {
    now_ += PauseWatch::kBeatNanos;
    watch_.Beat();
    EXPECT_EQ(watch_.Take(now_), 0);
  }
  now_ += PauseWatch::kLeastNanos;
  EXPECT_EQ(watch_.Take(now_), 0);
}

TEST_F(PauseWatchTest, AGapIsAPauseOnce) {
  now_ += PauseWatch::kLeastNanos + 1;
  watch_.Beat();
  EXPECT_EQ(watch_.Take(now_), PauseWatch::kLeastNanos + 1);
  EXPECT_EQ(watch_.Take(now_), 0);
}

TEST_F(PauseWatchTest, WhoAsksBeforeTheNextBeatIsToldToo) {
  now_ += 13'000'000'000;
  EXPECT_EQ(watch_.Take(now_), 13'000'000'000);
  watch_.Beat();
  EXPECT_EQ(watch_.Take(now_), 0);
}

TEST_F(PauseWatchTest, PausesAddUp) {
  for (int i = 0; i < 3; ++i) {
    now_ += 2 * PauseWatch::kLeastNanos;
    watch_.Beat();
  }
  now_ += 2 * PauseWatch::kLeastNanos;
  EXPECT_EQ(watch_.Take(now_), 8 * PauseWatch::kLeastNanos);
}

// The thread may see the gap first, or the caller.
TEST_F(PauseWatchTest, AGapIsAPauseOnceNextToTheThread) {
  watch_.Start();
  now_ += 5'000'000'000;
  EXPECT_EQ(watch_.Take(now_), 5'000'000'000);
  EXPECT_EQ(watch_.Take(now_), 0);
}

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
