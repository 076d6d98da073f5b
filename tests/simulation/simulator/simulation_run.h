// Many seeds of the simulation, on any number of threads. The result does not depend on that
// number.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_SIMULATION_RUN_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_SIMULATION_RUN_H_

#include <cstdint>
#include <string>

#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {

struct RunOptions {
  uint64_t seed = 1;          // of the first simulator; later ones count up
  int64_t operations = 0;     // at least this many, unless a violation or `most_seeds` ends the run
  int64_t most_seeds = 0;     // 0: as many as needed
  int steps_per_seed = 2000;  // operations drawn for one seed
  int threads = 1;
  bool progress = false;  // prints the number of each seed to standard error when it begins
};

struct RunResult {
  SimulatorCounts counts;
  int64_t seeds = 0;
  uint64_t hash = 0;       // over all seeds, in order
  int64_t violations = 0;  // 0 or 1: the first one ends the run
  uint64_t failing_seed = 0;
  std::string violation;  // with the end of its trace
};

RunResult RunSeeds(const RunOptions& options);

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_SIMULATION_RUN_H_
