#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/simulation/engine_simulator.h"

namespace mla::simulation {
namespace {

#if defined(MLA_SANITIZED)
constexpr int kSeeds = 60;
#else
constexpr int kSeeds = 2000;
#endif
constexpr int kOperationsPerSeed = 500;

uint64_t FirstSeed() {
  const char* given = std::getenv("MLA_TEST_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

int Seeds() { return std::getenv("MLA_TEST_LONG") == nullptr ? kSeeds : kSeeds * 20; }

TEST(EngineSimulation, RandomOperationsAgreeWithTheModel) {
  SimulatorStats total;
  for (int i = 0; i < Seeds(); ++i) {
    const uint64_t seed = FirstSeed() + static_cast<uint64_t>(i);
    EngineSimulator simulator(seed);
    std::string wrong;
    for (int op = 0; op < kOperationsPerSeed && wrong.empty(); ++op) wrong = simulator.Step();
    if (wrong.empty()) wrong = simulator.Finish();
    ASSERT_EQ(wrong, "") << "replay with MLA_TEST_SEED=" << seed << ", operation "
                         << simulator.stats().operations;
    total.operations += simulator.stats().operations;
    total.answers_checked += simulator.stats().answers_checked;
    total.refusals += simulator.stats().refusals;
    total.commits += simulator.stats().commits;
    total.aborts += simulator.stats().aborts;
    total.ranks_complete += simulator.stats().ranks_complete;
    total.ranks_late += simulator.stats().ranks_late;
    total.slices_fused += simulator.stats().slices_fused;
    total.slice_waits_expired += simulator.stats().slice_waits_expired;
    total.slice_waits_skipped += simulator.stats().slice_waits_skipped;
  }
  RecordProperty("operations", std::to_string(total.operations));
  // The mix must reach every kind of outcome, or the test proves little.
  EXPECT_GT(total.answers_checked, total.operations / 20);
  EXPECT_GT(total.refusals, total.operations / 100);
  EXPECT_GT(total.commits, total.operations / 100);
  EXPECT_GT(total.aborts, total.operations / 200);
  EXPECT_GT(total.ranks_complete, total.operations / 50);
  EXPECT_GT(total.ranks_late, total.operations / 1000);
  EXPECT_GT(total.slices_fused, total.operations / 100);
  EXPECT_GT(total.slice_waits_expired, total.operations / 1000);
  EXPECT_GT(total.slice_waits_skipped, total.operations / 2000);
}

TEST(EngineSimulation, ASeedReplays) {
  uint64_t traces[2];
  for (uint64_t& trace : traces) {
    EngineSimulator simulator(FirstSeed());
    for (int op = 0; op < kOperationsPerSeed; ++op) ASSERT_EQ(simulator.Step(), "");
    trace = simulator.trace();
  }
  EXPECT_EQ(traces[0], traces[1]);
}

}  // namespace
}  // namespace mla::simulation
