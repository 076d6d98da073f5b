#include "server/admission/prefix_turns.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace mla::server {
namespace {

// Turns that take as much as they are told, one at a time; places do not rest.
class PrefixTurnsTest : public ::testing::Test {
 protected:
  static bool Stays() { return false; }

  // A call of the tenant's on a thread of its own, which waits for its turn, and takes `used`.
  void Call(char name, scheduler::TenantKey tenant, int64_t used, int32_t weight = 1) {
    const int64_t before = turns_.waiting();
    threads_.emplace_back([=, this] {
      ASSERT_TRUE(turns_.Begin(tenant, weight, Stays));
      {
        const MutexLock lock(mutex_);
        order_ += name;
      }
      cpu_ns_ += used;
      PrefixTurns::End();
    });
    while (turns_.waiting() == before) std::this_thread::yield();
  }
  // Runs calls that were made while the first turn was held, and returns their order.
  std::string RunAll() {
    PrefixTurns::End();
    for (std::thread& thread : threads_) thread.join();
    return order_;
  }

  std::atomic<int64_t> cpu_ns_{0};
  PrefixTurns turns_{{.turns = 1, .rests = false, .cpu_ns = [this] { return cpu_ns_.load(); }}};
  std::vector<std::thread> threads_;
  Mutex mutex_;
  std::string order_;
};

TEST_F(PrefixTurnsTest, CallsOfOneTenantGoInTheirOrder) {
  ASSERT_TRUE(turns_.Begin(9, 1, Stays));
  for (const char name : {'a', 'b', 'c'}) Call(name, 1, 5);
  EXPECT_EQ(RunAll(), "abc");
}

TEST_F(PrefixTurnsTest, AFloodOfOneTenantLetsOthersIn) {
  ASSERT_TRUE(turns_.Begin(9, 1, Stays));
  for (const char name : {'a', 'b', 'c', 'd'}) Call(name, 1, 100);
  Call('x', 2, 1);
  Call('y', 2, 1);
  // The tenants begin alike, so the oldest call goes first; its tenant then has had its part.
  EXPECT_EQ(RunAll(), "axybcd");
}

TEST_F(PrefixTurnsTest, AWeightOfTwoIsTwiceTheTime) {
  ASSERT_TRUE(turns_.Begin(9, 1, Stays));
  for (const char name : {'a', 'b', 'c', 'd'}) Call(name, 1, 100, 2);
  for (const char name : {'x', 'y'}) Call(name, 2, 100, 1);
  EXPECT_EQ(RunAll(), "axbcyd");
}

TEST_F(PrefixTurnsTest, TimeWithoutCallsIsNotSavedUp) {
  for (int i = 0; i < 10; ++i) {  // the first tenant has had much
    ASSERT_TRUE(turns_.Begin(1, 1, Stays));
    cpu_ns_ += 100;
    PrefixTurns::End();
  }
  ASSERT_TRUE(turns_.Begin(1, 1, Stays));
  for (const char name : {'a', 'b'}) Call(name, 2, 100);
  Call('x', 1, 100);
  EXPECT_EQ(RunAll(), "axb");
}

TEST_F(PrefixTurnsTest, ACallThatIsGivenUpWaitsNoMore) {
  ASSERT_TRUE(turns_.Begin(9, 1, Stays));
  std::atomic<bool> gone{false};
  std::thread caller([&] { EXPECT_FALSE(turns_.Begin(1, 1, [&] { return gone.load(); })); });
  while (turns_.waiting() == 0) std::this_thread::yield();
  gone = true;
  caller.join();
  EXPECT_EQ(turns_.waiting(), 0);
  PrefixTurns::End();
}

TEST_F(PrefixTurnsTest, AThreadWithoutATurnEndsNone) {
  ASSERT_TRUE(turns_.Begin(9, 1, Stays));
  std::thread([] { PrefixTurns::End(); }).join();
  Call('a', 1, 1);
  EXPECT_EQ(order_, "");
  EXPECT_EQ(RunAll(), "a");
}

// A place rests for as long as its turn has taken.
TEST(PrefixTurnsRestTest, ThePlaceIsFreeAfterItsRest) {
  std::atomic<int64_t> cpu_ns{0};
  PrefixTurns turns({.turns = 1, .rests = true, .cpu_ns = [&] { return cpu_ns.load(); }});
  const auto stays = [] { return false; };
  ASSERT_TRUE(turns.Begin(1, 1, stays));
  const auto begun = std::chrono::steady_clock::now();
  cpu_ns += 30'000'000;
  PrefixTurns::End();
  ASSERT_TRUE(turns.Begin(1, 1, stays));
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(30));
  PrefixTurns::End();
}

}  // namespace
}  // namespace mla::server
