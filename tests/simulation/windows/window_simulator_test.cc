#include "tests/simulation/windows/window_simulator.h"

#include "gtest/gtest.h"
#include "tests/simulation/seed_runs.h"

namespace mla::simulation {
namespace {

constexpr int kOperations = 300;

TEST(WindowSimulator, RandomOperationsAreAsForetold) {
  WindowCounts counts;
  const int64_t share = RunTestSeeds<WindowSimulator>(kOperations, &counts);
  ASSERT_GT(share, 0);
  // If the mix does not reach every kind of outcome, the run proves little.
  EXPECT_GT(counts.operations, 100 * share);
  EXPECT_GT(counts.answers, 200 * share);
  EXPECT_GT(counts.commits, 20 * share);
  EXPECT_GT(counts.aborts, 2 * share);
  EXPECT_GT(counts.passed, share / 2);
  EXPECT_GT(counts.tails, 20 * share);
  EXPECT_GT(counts.moves, share / 2);
}

TEST(WindowSimulator, ASeedRepeats) { ExpectThatASeedRepeats<WindowSimulator>(kOperations); }

}  // namespace
}  // namespace mla::simulation
