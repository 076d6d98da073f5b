// Runs of a simulator under many seeds, for its test. A simulator is constructed from a seed and
// has Run(operations), which returns the violation or "", counts() and hash().
#ifndef MLA_TESTS_SIMULATION_SEED_RUNS_H_
#define MLA_TESTS_SIMULATION_SEED_RUNS_H_

#include <cstdint>
#include <string>

#include "base/testing/long_runs.h"
#include "gtest/gtest.h"
#include "tests/simulation/first_seed.h"

namespace mla::simulation {

// Seeds of a test, fewer with sanitizers; MLA_TEST_LONG makes them 20 times as many.
#if defined(MLA_SANITIZED)
inline constexpr int64_t kTestSeeds = 20;
#else
inline constexpr int64_t kTestSeeds = 200;
#endif

// Runs `operations` operations under each seed and adds up the counts. Returns the number of seeds,
// or 0 after a violation, which fails the test.
template <typename Simulator, typename Counts>
int64_t RunTestSeeds(int operations, Counts* counts) {
  const int64_t seeds = kTestSeeds * (IsLongRun() ? 20 : 1);
  for (int64_t i = 0; i < seeds; ++i) {
    const uint64_t seed = FirstSeed() + static_cast<uint64_t>(i);
    Simulator simulator(seed);
    const std::string violation = simulator.Run(operations);
    EXPECT_EQ(violation, "") << "seed " << seed;
    if (!violation.empty()) return 0;
    counts->Add(simulator.counts());
  }
  return seeds;
}

// Checks that a seed determines everything that happens, and that another seed differs.
template <typename Simulator>
void ExpectThatASeedRepeats(int operations) {
  Simulator first(FirstSeed()), again(FirstSeed()), other(FirstSeed() + 1);
  EXPECT_EQ(first.Run(operations), "");
  EXPECT_EQ(again.Run(operations), "");
  EXPECT_EQ(other.Run(operations), "");
  EXPECT_EQ(first.hash(), again.hash());
  EXPECT_NE(first.hash(), other.hash());
}

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SEED_RUNS_H_
