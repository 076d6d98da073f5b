// Measures how long a request that can run may wait while other tenants keep their queues full.
#ifndef MLA_TESTS_SIMULATION_SIMULATOR_FAIRNESS_H_
#define MLA_TESTS_SIMULATION_SIMULATOR_FAIRNESS_H_

#include "tests/simulation/simulator/world.h"

namespace mla::simulation {

// Its operations return true if they had an effect. Not thread-safe.
class Fairness final {
 public:
  // The world must outlive it.
  explicit Fairness(World* world) : w_(*world) {}

  bool Flood();
  void NotePages(const OracleStep& step);
  void NoteTaken(SimRequest* request, int64_t offset, int64_t bytes);
  bool IsBulk(const OracleStep& step, const AttendSpec& spec) const;
  void WaitsFrom(SimRequest* request) const;
  void OnSubmitted(uint64_t serial);  // to the device

 private:
  int64_t LeastCost(const Shape& shape, int rows, int heads, int cached) const;
  int64_t MostCost(const Shape& shape, int rows, int heads, int cached) const;
  bool DrawStored(int tenant, bool of_tenant, AttendSpec* spec, uint64_t* key);
  void Prepare(int tenant);
  bool DrawFlood(bool bulk, std::vector<FloodQueue>* flood);
  bool FloodRound(const std::vector<FloodQueue>& flood);
  bool WarmUp(const std::vector<FloodQueue>& flood);
  int64_t MostPassedOver(const std::vector<FloodQueue>& flood) const;
  void SendVictim(uint64_t key, const AttendSpec& spec, const std::vector<FloodQueue>& flood);

  World& w_;
  // KV bytes of service by tenant: lower and upper bound.
  std::array<int64_t, kTenantNumbers> least_served_ = {}, most_served_ = {};
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_SIMULATOR_FAIRNESS_H_
