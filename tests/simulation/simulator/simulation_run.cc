#include "tests/simulation/simulator/simulation_run.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "tests/simulation/ahead/ahead_simulator.h"
#include "tests/simulation/hand_over/hand_over_simulator.h"
#include "tests/simulation/windows/window_simulator.h"

namespace mla::simulation {
namespace {

// Shares of the operations that are run in addition, for models with a window, calls ahead of their
// tensors, and drains to another server.
constexpr int kWindowShare = 10, kAheadShare = 4, kHandOverShare = 50;

struct SeedResult {
  SimulatorCounts counts;
  uint64_t hash = 0;
  std::string violation;
};

SeedResult RunSeed(uint64_t seed, int steps) {
  Simulator simulator(seed);
  SeedResult result;
  result.violation = simulator.Run(steps);
  if (!result.violation.empty()) result.violation += "\n" + simulator.Tail();
  result.counts = simulator.counts();
  result.hash = simulator.hash();
  if (!result.violation.empty()) return result;
  WindowSimulator windows(seed);
  result.violation = windows.Run(steps / kWindowShare);
  result.counts.windows_checked = windows.counts().answers;
  result.hash ^= windows.hash();
  if (!result.violation.empty()) return result;
  AheadSimulator ahead(seed);
  result.violation = ahead.Run(steps / kAheadShare);
  result.counts.late_checked = ahead.counts().late;
  result.hash ^= ahead.hash();
  if (!result.violation.empty()) return result;
  HandOverSimulator hand_over(seed);
  result.violation = hand_over.Run(steps / kHandOverShare);
  result.counts.sequences_moved = hand_over.counts().moved;
  result.hash ^= hand_over.hash();
  return result;
}

}  // namespace

RunResult RunSeeds(const RunOptions& options) {
  RunResult run;
  run.hash = 0xcbf29ce484222325u;
  const int threads = std::max(1, options.threads);
  // Seeds run in rounds, one a thread, and count in order. A round may run more than is needed; the
  // surplus is ignored.
  while (run.counts.total() < options.operations &&
         (options.most_seeds == 0 || run.seeds < options.most_seeds)) {
    std::vector<SeedResult> results(static_cast<size_t>(threads));
    const uint64_t first = options.seed + static_cast<uint64_t>(run.seeds);
    const auto one = [&](int i) {
      results[static_cast<size_t>(i)] =
          RunSeed(first + static_cast<uint64_t>(i), options.steps_per_seed);
    };
    if (options.progress) {
      std::fprintf(stderr, "seed %lld\n", static_cast<long long>(run.seeds) + threads);
    }
    std::vector<std::thread> workers;
    for (int i = 1; i < threads; ++i) workers.emplace_back(one, i);
    one(0);
    for (std::thread& worker : workers) worker.join();
    for (const SeedResult& result : results) {
      if (run.counts.total() >= options.operations) break;
      if (options.most_seeds != 0 && run.seeds >= options.most_seeds) break;
      run.counts.Add(result.counts);
      run.hash = (run.hash ^ result.hash) * 0x100000001b3u;
      if (!result.violation.empty()) {
        run.violations = 1;
        run.failing_seed = options.seed + static_cast<uint64_t>(run.seeds);
        run.violation = result.violation;
        ++run.seeds;
        return run;
      }
      ++run.seeds;
    }
  }
  return run;
}

}  // namespace mla::simulation
