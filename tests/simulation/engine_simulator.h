// Random operations on an engine from a seed, judged by a model that is written apart from the
// product.
//
// The model knows, per sequence, the committed rows of every layer, and per open step the rows that
// were accepted. From that alone it foretells each answer: refused and with which reason, or
// answered with the dense attention over exactly the rows that the contract says are visible.
// Everything runs in one thread on a simulated clock, so a seed replays.
#ifndef MLA_TESTS_SIMULATION_ENGINE_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_ENGINE_SIMULATOR_H_

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {

using scheduler::SequenceId;
using scheduler::StepId;
using scheduler::StreamId;
using scheduler::testing::EngineHarness;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;

struct SimulatorStats {
  int64_t operations = 0;
  int64_t answers_checked = 0;  // outputs compared with the dense answer
  int64_t refusals = 0;         // foretold and given
  int64_t commits = 0;
  int64_t aborts = 0;
  int64_t ranks_complete = 0;  // rows of which every participant sent its slice in time
  int64_t ranks_late = 0;      // ... or some did not
  int64_t slices_fused = 0;    // as the engine counts them
  int64_t slice_waits_expired = 0;
  int64_t slice_waits_skipped = 0;
};

class EngineSimulator {
 public:
  explicit EngineSimulator(uint64_t seed);
  // One random operation and all checks; empty, or what went wrong.
  std::string Step();
  // Lets everything finish and checks that nothing is left over.
  std::string Finish();
  const SimulatorStats& stats() const { return stats_; }
  // Folds every answer; equal for equal seeds.
  uint64_t trace() const { return trace_; }

 private:
  static constexpr int kLayers = 2;
  static constexpr int kHeads = 4;

  struct ModelSequence {
    SequenceId id = 0;
    uint64_t epoch = 1;
    std::vector<uint64_t> rows[kLayers];  // keys of the committed rows
    StepId step = 0;                      // 0: none
  };
  struct Member {
    SequenceId id = 0;
    int start = 0;
    int rows = 0;
    int offset = 0;
  };
  struct ModelStep {
    std::vector<StreamId> streams;  // [0] began it
    int participants = 1;
    std::vector<Member> members;
    std::vector<scheduler::StepSequenceArgs> args;
    int total = 0;
    std::vector<uint64_t> rows[kLayers];  // accepted
    bool has_writer[kLayers] = {false, false};
    int writer_head[kLayers] = {0, 0};
  };
  struct Waiting {  // a request that was accepted and not yet answered
    std::unique_ptr<TestRequest> request;
    StepId step = 0;
    uint64_t q_key = 0;
    bool computes = false;
    bool waits_for_rows = false;  // a query ahead of its KV rows: may time out
    bool must_differ = false;     // a repeat with other bytes
    // What each of its rows sees, as keys.
    std::vector<std::vector<uint64_t>> visible;
  };

  uint64_t Pick(uint64_t below) { return random_() % below; }
  const Row& RowOf(uint64_t key);
  ModelSequence* AnySequence(bool free);
  std::map<StepId, ModelStep>::iterator AnyStep();
  bool Alive(StreamId stream) const;

  std::string OpenSequence();
  std::string ForkSequence();
  std::string TruncateSequence();
  std::string ReleaseSequence();
  std::string OpenStream();
  std::string CloseStream();
  std::string BeginStep();
  std::string JoinStep();
  std::string AttendNext();
  std::string AttendOutOfOrder();
  std::string AttendRepeat();
  std::string QuerySlice();
  std::string AttendByRanks();
  std::string EndStep();
  std::string AbortStep();
  std::string LetTimePass();
  std::string Launch();

  // Adds `count` rows to what the layer has accepted, and says so to queries that were ahead of
  // them.
  std::vector<Row> AcceptRows(StepId id, int layer, int count);
  void ShowRows(StepId id, int layer);
  // Lets all waits for sibling slices end and everything that is ready be launched, and checks that
  // nothing is left but what waits for its KV rows.
  std::string Settle();
  std::string Keep(std::unique_ptr<TestRequest> request, StepId step, uint64_t q_key,
                   bool computes);
  std::vector<uint64_t> Visible(const ModelStep& step, int layer, int row) const;
  std::string CheckAnswers();
  std::string CheckAnswer(const Waiting& waiting);
  std::string CheckOutput(const Waiting& waiting);
  std::string CheckSequences();
  void DropStep(StepId id);
  std::string Refused(const TestRequest& request, const std::string& reason);
  void Trace(uint64_t value) { trace_ = trace_ * 0x100000001b3u ^ value; }

  std::mt19937_64 random_;
  EngineHarness harness_;
  std::vector<StreamId> streams_;
  std::list<ModelSequence> sequences_;
  std::map<StepId, ModelStep> steps_;
  std::list<Waiting> waiting_;
  std::map<uint64_t, Row> row_cache_;
  StepId next_step_ = 1;
  uint64_t next_key_ = 1;
  SimulatorStats stats_;
  uint64_t trace_ = 0xcbf29ce484222325u;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_ENGINE_SIMULATOR_H_
