#include "tests/simulation/ahead/ahead_simulator.h"

#include "gtest/gtest.h"
#include "tests/simulation/seed_runs.h"

namespace mla::simulation {
namespace {

constexpr int kOperations = 1000;

TEST(AheadSimulator, RandomOperationsAreAsForetold) {
  AheadCounts counts;
  const int64_t share = RunTestSeeds<AheadSimulator>(kOperations, &counts);
  ASSERT_GT(share, 0);
  // If the mix does not reach every kind of outcome, the run proves little.
  EXPECT_GT(counts.operations, 300 * share);
  EXPECT_GT(counts.answers, 25 * share);
  EXPECT_GT(counts.ahead, 10 * share);
  EXPECT_GT(counts.together, share);
  EXPECT_GT(counts.late, 2 * share);
  EXPECT_GT(counts.busy, 10 * share);
  EXPECT_GT(counts.commits, 5 * share);
  EXPECT_GT(counts.aborts, share);
  EXPECT_GT(counts.faults, share);
  EXPECT_GT(counts.ends, share);
}

TEST(AheadSimulator, ASeedRepeats) { ExpectThatASeedRepeats<AheadSimulator>(kOperations); }

}  // namespace
}  // namespace mla::simulation
