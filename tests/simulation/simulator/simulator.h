// One seed of the simulation: the real validator and engine (admission, queue, planner, cache,
// leases, launches) with a simulated transport, clock and device, in one thread. Each operation is
// drawn from the seed, predicted by the oracle, executed and checked:
//
// - Every request gets exactly one answer, with the outcome or one of the reasons predicted.
// - An OK answer equals dense attention over the rows that the contract makes visible.
// - Pages, sequences, steps, models and streams in use equal the oracle's books.
// - The device saw no word of another tenant, no invalid plan, and no launch past a deadline or
//   beyond its limits. Requests' memory is not touched after their answer.
// - When faults end, everything that can run is answered, and in the end nothing remains.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_

#include <cstdint>
#include <string>

#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/control.h"
#include "tests/simulation/simulator/copies.h"
#include "tests/simulation/simulator/fairness.h"
#include "tests/simulation/simulator/operators.h"
#include "tests/simulation/simulator/prefixes.h"
#include "tests/simulation/simulator/repeats.h"
#include "tests/simulation/simulator/steps.h"
#include "tests/simulation/simulator/transport.h"
#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

class Simulator final {
 public:
  explicit Simulator(uint64_t seed);
  ~Simulator();

  // Runs up to `operations` steps and the end phase. Returns "" or a violation.
  std::string Run(int operations);
  const SimulatorCounts& counts() const { return w_.counts; }
  uint64_t hash() const { return w_.hash; }
  // The last operations, one a line.
  std::string Tail() const { return w_.Tail(); }

  // For operations within others.
  Op DrawOp();
  // Runs the operation, unless it does not apply now, and checks the books.
  void Operate(Op op);

 private:
  bool Do(Op op);

  World w_;
  Checks checks_;
  Control control_;
  Copies copies_;
  Fairness fairness_;
  Operators operators_;
  Prefixes prefixes_;
  Repeats repeats_;
  Steps steps_;
  Transport transport_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_SIMULATOR_H_
