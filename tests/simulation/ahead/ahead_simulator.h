// One seed of the simulation of calls that are submitted ahead of their tensors. In one thread it
// runs the real engine, a device that computes when a launch ends, the rules by which a command
// ring submits calls, and clients whose GPUs finish a call's tensors at any time. Some launches see
// their calls' words in time; other calls are late and are sent again. Other clients' requests run
// at the same time, launches fail, steps are aborted, sequences are released, and rings and a
// server end.
//
// - Until its tensors are ready, a call's memory holds values that no row has, and no reply shows
//   them.
// - An OK reply equals dense attention over the rows of the committed steps.
// - A launch waits for the words of one client, or of both ranks of a step, whatever others have
//   gone ahead.
// - A request that is handed back has no output, and its word is not stored.
// - A step without failures ends successfully, with all its rows.
// - Every call is answered once, and in the end the engine holds nothing.
#ifndef MLA_TESTS_SIMULATION_AHEAD_AHEAD_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_AHEAD_AHEAD_SIMULATOR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "scheduler/testing/engine_harness.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::simulation {

struct AheadCounts {
  int64_t operations = 0;  // operations that had an effect
  int64_t answers = 0;     // answers that were compared
  int64_t ahead = 0;       // launches
  int64_t together = 0;    // launches that waited for both ranks
  int64_t late = 0, busy = 0, commits = 0, aborts = 0, faults = 0, ends = 0;
  void Add(const AheadCounts& other);
};

class AheadSimulator {
 public:
  explicit AheadSimulator(uint64_t seed);
  // After a violation the engine may still hold requests of the clients.
  ~AheadSimulator() { harness_.reset(); }

  // Returns "" or a violation.
  std::string Run(int operations);
  const AheadCounts& counts() const { return counts_; }
  uint64_t hash() const { return hash_; }

 private:
  using Rows = std::vector<scheduler::testing::Row>;
  struct Call {
    std::unique_ptr<scheduler::testing::TestRequest> request;
    uint32_t number = 0;  // value of its client's words
    int layer = 0, first = 0, count = 0;
    uint64_t q_key = 0;
    Rows rows;  // empty for the second rank, which brings none
    // Contents of its memory once the tensors are ready.
    std::vector<kernels::Bf16> kv, queries;
    bool there = false, offered = false;
    bool ahead = false;      // the engine has it and must wait for its word
    bool in_engine = false;  // the engine has it, ahead or not
    int answers = 0;         // answers of the request that have been checked
    bool answered = false;   // finally answered
  };
  struct Client {
    // If steps have two ranks, which share the heads: the second rank, with a ring of its own.
    Client* peer = nullptr;
    Client* leader = nullptr;  // of a second rank
    scheduler::StreamId stream = 0;
    scheduler::SequenceId sequence = 0;
    uint32_t ready = 0, done = 0;              // the words
    uint32_t number = 0;                       // number of the last call
    std::vector<Rows> text;                    // committed, by layer
    scheduler::StepId step = 0;                // 0: no step is open
    bool chained = false;                      // its calls are chained
    bool may_fail = false;                     // the step may fail
    int total = 0;                             // rows of the step
    std::vector<std::unique_ptr<Call>> calls;  // calls of the step, in the order of publication
    size_t taken = 0;                          // calls taken by the ring
    Call* held = nullptr;                      // the last taken call, if it is held
    bool wants_end = false;                    // EndStep is published after the calls
    std::unique_ptr<scheduler::testing::TestRequest> end;
  };

  uint64_t Pick(uint64_t below);
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }
  static scheduler::testing::HarnessOptions Options(std::unique_ptr<kernels::AttentionBackend> b);

  // Returns true if it had an effect.
  bool Operate();
  void Open(Client* client);
  bool Begin(Client* client);
  bool Publish(Client* client);
  void PublishCall(Client* client, int layer, int first, int count);
  bool Ready(Client* client);
  bool End(Client* client);
  bool Abort(Client* client);
  bool Evict(Client* client);
  bool Close(Client* client);
  bool Fault();
  bool StopServer();

  // Runs the ring until it has nothing to do.
  void Pump(Client* client);
  bool Collect(Client* client, Call* call);
  bool CollectAny(Client* client);
  bool Advance(Client* client);
  bool AnyAhead(const Client& client) const;
  static bool AllAnswered(const Client& client);
  void HandOver(Client* client, Call* call, bool ahead);
  void CheckAnswer(Client* client, const Call& call);
  void CheckEnd(Client* client);
  // Forgets a step that is gone, and its unanswered calls.
  void Forget(Client* client);
  void CheckBooks();
  void CheckGate(std::span<const kernels::WordValue> words);
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
