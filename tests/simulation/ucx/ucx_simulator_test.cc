#include "tests/simulation/ucx/ucx_simulator.h"

#include "gtest/gtest.h"
#include "tests/simulation/seed_runs.h"

namespace mla::simulation {
namespace {

constexpr int kOperations = 200;

TEST(UcxSimulator, RowsAreRightUnderRandomOperationsAndFaults) {
  UcxCounts counts;
  const int64_t share = RunTestSeeds<UcxSimulator>(kOperations, &counts);
  ASSERT_GT(share, 0);
  // If the mix does not reach every kind of outcome, the run proves little.
  EXPECT_GT(counts.submitted, 40 * share);
  EXPECT_GT(counts.answered, 20 * share);
  EXPECT_GT(counts.puts, share);
  EXPECT_GT(counts.refusals, share / 4);
  EXPECT_GT(counts.killed, share);
  EXPECT_GT(counts.stopped, share / 4);
  EXPECT_GT(counts.cut_off, share / 2);
}

}  // namespace
}  // namespace mla::simulation
