// Calls that are sent again, as by a client whose reply was lost. The same call gets the same reply
// and changes nothing. The same request id with other contents is refused. A call that names an
// ended step is told how it ended.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_REPEATS_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_REPEATS_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Repeats final {
 public:
  // The world must outlive it.
  explicit Repeats(World* world) : w_(*world) {}

  bool Resend();

 private:
  bool ResendCreation();
  bool ResendOpen(int tenant, const OracleSequence& known, bool changed);
  bool ResendFork(int tenant, const OracleSequence& known, bool changed);
  bool ResendTruncate();
  bool ResendToClosedStep();
  // For a call that was sent again. `repeats` is null if it opened a sequence for the first time.
  void CheckRepeated(const scheduler::SequenceInfo& info, const OracleSequence* repeats);

  World& w_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_REPEATS_H_
