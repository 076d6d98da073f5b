#include "tests/simulation/hand_over/hand_over_simulator.h"

#include "gtest/gtest.h"
#include "tests/simulation/seed_runs.h"

namespace mla::simulation {
namespace {

constexpr int kOperations = 200;

TEST(HandOverSimulator, RandomDrainsAreAsForetold) {
  HandOverCounts counts;
  const int64_t share = RunTestSeeds<HandOverSimulator>(kOperations, &counts);
  ASSERT_GT(share, 0);
  // If the mix does not reach every kind of outcome, the run proves little.
  EXPECT_GT(counts.operations, 100 * share);
  EXPECT_GT(counts.drains, 10 * share);
  EXPECT_GT(counts.moved, 10 * share);
  EXPECT_GT(counts.kept, share);
  EXPECT_GT(5 * counts.divided, share);
  EXPECT_GT(5 * counts.passed_on, share);
  EXPECT_GT(counts.checked, 10 * share);
  EXPECT_GT(2 * counts.refused, share);
  EXPECT_GT(2 * counts.cut, share);
  EXPECT_GT(2 * counts.late, share);
  EXPECT_GT(5 * counts.crashes, share);
  EXPECT_GT(counts.weights_moved, share);
  EXPECT_GT(2 * counts.weights_refused, share);
  EXPECT_GT(5 * counts.weights_cut, share);
  EXPECT_GT(counts.weight_parts, share);
  EXPECT_GT(5 * counts.weights_spoilt, share);
}

TEST(HandOverSimulator, ASeedRepeats) { ExpectThatASeedRepeats<HandOverSimulator>(kOperations); }

}  // namespace
}  // namespace mla::simulation
