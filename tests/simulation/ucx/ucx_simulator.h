// Rings over UCX under random operations: workers with frames, puts or encryption send requests of
// any size and take replies; servers answer late; ends of rings are killed, stopped and cut off;
// messages arrive in any order or are kept back. Both ends are the product's, UCX is the fake of
// tests/fake_ucx, and the oracle is the pattern of each request's inputs and outputs.
//
// The seed decides every operation. A client's own thread decides how far its frames have come by
// then, so that two runs of a seed may differ in that. Threading: one thread.
#ifndef MLA_TESTS_SIMULATION_UCX_UCX_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_UCX_UCX_SIMULATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "tests/fake_ucx/ring_pair.h"

namespace mla::simulation {

struct UcxCounts {
  int64_t submitted = 0, answered = 0, puts = 0, refusals = 0;  // refusals: of full rings
  int64_t killed = 0, stopped = 0, cut_off = 0;
  void Add(const UcxCounts& other);
};

class UcxSimulator final {
 public:
  explicit UcxSimulator(uint64_t seed);
  ~UcxSimulator();

  // Runs that many operations, and all requests of rings that live to their ends. Returns a
  // violation, or "".
  std::string Run(int operations);
  const UcxCounts& counts() const { return counts_; }

 private:
  struct Worker {
    std::unique_ptr<fake_ucx::RingPair> pair;
    bool cut = false;
  };

  uint64_t Pick(uint64_t bound) { return NextSplitMix(&state_) % bound; }
  std::string Open(Worker* worker);
  std::string Do(Worker* worker);
  void Move(Worker* worker);
  void Submit(Worker* worker);
  std::string End(Worker* worker);
  std::string EndByRelay(Worker* worker);
  std::string EndByClient(Worker* worker);
  std::string StopForAWhile(Worker* worker);
  std::string Finish();

  uint64_t state_;
  std::vector<Worker> workers_;
  UcxCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_UCX_UCX_SIMULATOR_H_
