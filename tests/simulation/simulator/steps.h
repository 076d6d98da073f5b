// Operations of the stepping protocol.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_STEPS_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_STEPS_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Steps final {
 public:
  // The world must outlive it.
  explicit Steps(World* world) : w_(*world) {}

  bool Branch();
  bool Begin();
  bool Join();
  bool Attend();
  bool Query();
  bool Ranks();
  bool Repeat();
  bool FillStep();
  bool Refusable();
  bool Malformed();
  bool End();
  bool Abort();
  OracleStep* AnyStep();
  bool SendRows(uint64_t step_id, int tenant);
  OracleBegin DrawBegin(int tenant);
  AttendSpec DrawAttend(const OracleStep& step);

 private:
  void SpoilBegin(OracleBegin* begin);

  World& w_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_STEPS_H_
