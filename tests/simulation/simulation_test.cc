#include <fstream>
#include <sstream>

#include "base/testing/long_runs.h"
#include "gtest/gtest.h"
#include "tests/simulation/first_seed.h"
#include "tests/simulation/simulator/simulation_run.h"

namespace mla::simulation {
namespace {

#if defined(MLA_SANITIZED)
constexpr int64_t kOperations = 100'000;
#else
constexpr int64_t kOperations = 500'000;
#endif

TEST(Simulation, ManyOperationsAreAsForetold) {
  RunOptions options;
  options.seed = FirstSeed();
  options.operations = kOperations * (IsLongRun() ? 40 : 1);
  options.threads = 2;
  const RunResult run = RunSeeds(options);
  ASSERT_EQ(run.violations, 0) << run.violation << "replay: ./dev sim --seed " << run.failing_seed
                               << " --seeds 1";
  const SimulatorCounts& counts = run.counts;
  for (size_t i = 0; i < counts.operations.size(); ++i) {
    RecordProperty(std::string("op_") + Name(static_cast<Op>(i)),
                   std::to_string(counts.operations[i]));
  }
  EXPECT_GE(counts.total(), options.operations);
  // If the mix does not reach every kind of outcome, the run proves little.
  const int64_t share = counts.total() / 1000;
  for (size_t i = 0; i < counts.operations.size(); ++i) {
    EXPECT_GT(counts.operations[i], 0) << Name(static_cast<Op>(i));
  }
  EXPECT_GT(counts.answers_checked, 100 * share);
  EXPECT_GT(counts.lists_checked, 10 * share);
  EXPECT_GT(counts.windows_checked, 10 * share);
  EXPECT_GT(counts.late_checked, share);
  EXPECT_GT(counts.sequences_moved, share / 4);
  EXPECT_GT(counts.refusals, 100 * share);
  EXPECT_GT(counts.resent, 2 * share);
  EXPECT_GT(counts.commits, 20 * share);
  EXPECT_GT(counts.aborts, 10 * share);
  EXPECT_GT(counts.expired, 5 * share);
  EXPECT_GT(counts.faults, share);
  EXPECT_GT(counts.one_slot_launches, 10 * share);
  EXPECT_GT(counts.scrubs, 5 * share);
  EXPECT_GT(counts.copies, share);
  EXPECT_GT(counts.slices_fused, share);
  EXPECT_GT(counts.pages_found, share);
  EXPECT_GT(counts.pages_of_equals, share / 100);
  EXPECT_GT(counts.pages_evicted, share / 4);
  EXPECT_GT(counts.pages_demoted, share);
  EXPECT_GT(counts.pages_restored, share / 4);
  EXPECT_GT(counts.pages_from_file, share / 200);
  EXPECT_GT(counts.pages_damaged, share / 100);
  EXPECT_GT(counts.pages_pinned, share / 100);
  EXPECT_GT(counts.rows_imported, share);
}

TEST(Simulation, ASeedRepeats) {
  RunOptions options;
  options.seed = FirstSeed();
  options.operations = 20'000;
  options.threads = 1;
  const RunResult first = RunSeeds(options);
  const RunResult again = RunSeeds(options);
  options.threads = 3;
  const RunResult together = RunSeeds(options);
  EXPECT_EQ(first.hash, again.hash);
  EXPECT_EQ(first.hash, together.hash);
  EXPECT_EQ(first.counts.total(), together.counts.total());
  options.seed += 1000;
  EXPECT_NE(RunSeeds(options).hash, first.hash);
}

TEST(Simulation, KeptSeedsHold) {
  std::ifstream file("tests/simulation/seeds/kept.txt");
  ASSERT_TRUE(file.is_open());
  int kept = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    RunOptions options;
    std::istringstream(line) >> options.seed >> options.steps_per_seed;
    options.operations = 1;
    options.most_seeds = 1;
    const RunResult run = RunSeeds(options);
    EXPECT_EQ(run.violations, 0) << line << "\n" << run.violation;
    ++kept;
  }
  EXPECT_GT(kept, 0);
}

}  // namespace
}  // namespace mla::simulation
