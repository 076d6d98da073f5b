// Calls of the control plane, time and faults.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_CONTROL_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_CONTROL_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Control final {
 public:
  // The world must outlive it.
  explicit Control(World* world) : w_(*world) {}

  bool RegisterAny() { return Register(w_.AnyTenant()); }
  bool Unregister();
  bool LoadWeights();
  bool Open(int tenant);
  bool OpenAny() { return Open(w_.AnyTenant()); }
  bool Fork();
  bool Truncate();
  bool Release();
  bool Renew();
  bool Get();
  bool OpenStream();
  bool CloseStream();
  bool Time();
  bool ArmFault();
  // Returns the child's id, or 0 if it was refused.
  uint64_t SendFork(int tenant, const OracleSequence& parent, uint64_t epoch, int64_t length);

 private:
  bool Register(int tenant);
  void CheckLists(int tenant);

  World& w_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_CONTROL_H_
