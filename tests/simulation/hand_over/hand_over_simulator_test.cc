#include "tests/simulation/hand_over/hand_over_simulator.h"

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
constexpr int kOperations = 200;

TEST(HandOverSimulator, RandomDrainsAreAsForetold) {
  HandOverCounts counts;
  const uint64_t seeds = kSeeds * (std::getenv("MLA_TEST_LONG") == nullptr ? 1 : 20);
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + seeds; ++seed) {
    HandOverSimulator simulator(seed);
    ASSERT_EQ(simulator.Run(kOperations), "") << "seed " << seed;
    counts.Add(simulator.counts());
  }
  // The mix reaches every kind of outcome, or the run proves little.
  const auto share = static_cast<int64_t>(seeds);
  EXPECT_GT(counts.operations, 100 * share);
  EXPECT_GT(counts.drains, 10 * share);
  EXPECT_GT(counts.moved, 10 * share);
  EXPECT_GT(counts.kept, share);
  EXPECT_GT(counts.checked, 10 * share);
  EXPECT_GT(2 * counts.refused, share);
  EXPECT_GT(2 * counts.cut, share);
  EXPECT_GT(2 * counts.late, share);
  EXPECT_GT(5 * counts.crashes, share);
}

TEST(HandOverSimulator, ASeedRepeats) {
  HandOverSimulator first(FirstSeed()), again(FirstSeed()), other(FirstSeed() + 1);
  EXPECT_EQ(first.Run(kOperations), "");
  EXPECT_EQ(again.Run(kOperations), "");
  EXPECT_EQ(other.Run(kOperations), "");
  EXPECT_EQ(first.hash(), again.hash());
  EXPECT_NE(first.hash(), other.hash());
}

}  // namespace
}  // namespace mla::simulation
