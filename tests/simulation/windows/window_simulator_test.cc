#include "tests/simulation/windows/window_simulator.h"

#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/simulation/first_seed.h"

namespace mla::simulation {
namespace {

#if defined(MLA_SANITIZED)
constexpr uint64_t kSeeds = 20;
#else
constexpr uint64_t kSeeds = 200;
#endif
constexpr int kOperations = 300;

TEST(WindowSimulator, RandomOperationsAreAsForetold) {
  WindowCounts counts;
  const uint64_t seeds = kSeeds * (std::getenv("MLA_TEST_LONG") == nullptr ? 1 : 20);
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + seeds; ++seed) {
    WindowSimulator simulator(seed);
    ASSERT_EQ(simulator.Run(kOperations), "") << "seed " << seed;
    counts.Add(simulator.counts());
  }
  // The mix reaches every kind of outcome, or the run proves little.
  const auto share = static_cast<int64_t>(seeds);
  EXPECT_GT(counts.operations, 100 * share);
  EXPECT_GT(counts.answers, 200 * share);
  EXPECT_GT(counts.commits, 20 * share);
  EXPECT_GT(counts.aborts, 2 * share);
  EXPECT_GT(counts.passed, share / 2);
  EXPECT_GT(counts.tails, 20 * share);
  EXPECT_GT(counts.moves, share / 2);
}

TEST(WindowSimulator, ASeedRepeats) {
  WindowSimulator first(FirstSeed()), again(FirstSeed()), other(FirstSeed() + 1);
  EXPECT_EQ(first.Run(kOperations), "");
  EXPECT_EQ(again.Run(kOperations), "");
  EXPECT_EQ(other.Run(kOperations), "");
  EXPECT_EQ(first.hash(), again.hash());
  EXPECT_NE(first.hash(), other.hash());
}

}  // namespace
}  // namespace mla::simulation
