// One seed of the simulation of calls that are handed over ahead of their tensors: the real engine,
// a device that computes when a launch ends, the rules by which a command ring hands over, and
// clients whose GPUs are done with a call's tensors at any time, in one thread. Some calls'
// launches see their word in time, others are late and come again, beside other clients' requests,
// launches that fail, steps that are aborted, sequences that go, rings and a server that end:
//
//   - until its tensors are there a call's memory holds what no row holds, and no answer shows it;
//   - an OK answer equals dense attention over the rows of the steps that were committed;
//   - a request that is handed back has no output, and its word is not stored;
//   - a step of which nothing has failed ends well, with all its rows;
//   - every call is answered once, and in the end the engine holds nothing.
#ifndef MLA_TESTS_SIMULATION_AHEAD_AHEAD_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_AHEAD_AHEAD_SIMULATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::simulation {

struct AheadCounts {
  int64_t operations = 0;  // that did something
  int64_t answers = 0;     // that were compared
  int64_t ahead = 0;       // launches
  int64_t late = 0, busy = 0, commits = 0, aborts = 0, faults = 0, ends = 0;
  void Add(const AheadCounts& other);
};

class AheadSimulator {
 public:
  explicit AheadSimulator(uint64_t seed);

  // Empty, or what went wrong.
  std::string Run(int operations);
  const AheadCounts& counts() const { return counts_; }
  uint64_t hash() const { return hash_; }

 private:
  using Rows = std::vector<scheduler::testing::Row>;
  struct Call {
    std::unique_ptr<scheduler::testing::TestRequest> request;
    uint32_t number = 0;  // in the words of its client
    int layer = 0, first = 0, seen = 0;
    uint64_t q_key = 0;
    Rows rows;
    // What its memory holds once the tensors are there.
    std::vector<kernels::Bf16> kv, queries;
    bool there = false, offered = false;
    bool ahead = false;      // the engine has it, and is to wait for its word
    bool in_engine = false;  // it has it, ahead or not
    int answers = 0;         // of the request, that have been looked at
    bool answered = false;   // for good
  };
  struct Client {
    scheduler::StreamId stream = 0;
    scheduler::SequenceId sequence = 0;
    uint32_t ready = 0, done = 0;              // the words
    uint32_t number = 0;                       // of the last call
    std::vector<Rows> text;                    // committed, by layer
    scheduler::StepId step = 0;                // 0: none is open
    bool chained = false;                      // its calls are
    bool may_fail = false;                     // the step
    int total = 0;                             // rows of the step
    std::vector<std::unique_ptr<Call>> calls;  // of the step, as they were published
    size_t taken = 0;                          // by the ring
    Call* held = nullptr;                      // of them, the last one
    bool wants_end = false;                    // published behind the calls
    std::unique_ptr<scheduler::testing::TestRequest> end;
  };

  uint64_t Pick(uint64_t below);
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }
  static scheduler::testing::HarnessOptions Options(std::unique_ptr<kernels::AttentionBackend> b);

  // True if anything was done.
  bool Operate();
  void Open(Client* client);
  bool Begin(Client* client);
  bool Publish(Client* client);
  bool Ready(Client* client);
  bool End(Client* client);
  bool Abort(Client* client);
  bool Evict(Client* client);
  bool Close(Client* client);
  bool Fault();
  bool StopServer();

  // What the ring does until there is nothing to do.
  void Pump(Client* client);
  bool Collect(Client* client, Call* call);
  bool CollectAny(Client* client);
  bool Advance(Client* client);
  bool AnyAhead(const Client& client) const;
  void HandOver(Client* client, Call* call, bool ahead);
  void CheckAnswer(Client* client, const Call& call);
  void CheckEnd(Client* client);
  // The step is gone; calls that no one has answered are forgotten.
  void Forget(Client* client);
  void CheckBooks();
  void Finish();
  void Fail(const std::string& what);

  uint64_t random_;
  scheduler::testing::FaultyBackend* device_ = nullptr;
  std::unique_ptr<scheduler::testing::EngineHarness> harness_;
  std::vector<std::unique_ptr<Client>> clients_;
  scheduler::StepId last_step_ = 0;
  uint64_t key_ = 0;
  std::string violation_;
  uint64_t hash_ = 0xcbf29ce484222325u;
  AheadCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_AHEAD_AHEAD_SIMULATOR_H_
