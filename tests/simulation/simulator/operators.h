// Operators' calls: quotas, evictions, drains and their end.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_OPERATORS_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_OPERATORS_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Operators final {
 public:
  // The world must outlive it.
  explicit Operators(World* world) : w_(*world) {}

  bool Drain();
  bool SetQuota();
  bool CallAsTenant();
  bool Evict();
  static scheduler::TenantQuota QuotaOf(const OracleQuota& quota);
  OracleQuota DrawQuota();
  void TouchModels();

 private:
  bool EvictModel();

  World& w_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_OPERATORS_H_
