// One seed of the simulation of models with a window and compressed entries. It runs the real
// engine over the reference backend, in one thread, with random operations on a few sequences:
// steps that end with some of their rows or are aborted, several at a time; forks, truncation,
// releases; exports, and later imports, also under the previous id. The rows that each row must
// attend to are kept separately, as lists of rows and entries by sequence and layer:
//
// - An OK answer equals attention in double over the last rows, all complete entries or the listed
//   ones, and the sink.
// - Forks, truncation and exports are granted exactly if the rows before are kept.
// - An import brings the rows that the window reaches, all entries, and the tail.
// - A tail is there, as it was sent, until rows before its position go.
// - The page groups in use hold exactly the present rows and entries; at the end none is in use.
#ifndef MLA_TESTS_SIMULATION_WINDOWS_WINDOW_SIMULATOR_H_
#define MLA_TESTS_SIMULATION_WINDOWS_WINDOW_SIMULATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/testing/engine_harness.h"
#include "tests/simulation/windows/window_moves.h"
#include "tests/simulation/windows/window_text.h"

namespace mla::simulation {

struct WindowCounts {
  int64_t operations = 0;  // operations that had an effect
  int64_t answers = 0;     // rows and heads that were compared
  int64_t commits = 0, aborts = 0;
  int64_t passed = 0;  // refusals because the window has passed
  int64_t tails = 0;   // tails that were read and were as predicted
  int64_t moves = 0;   // imports that were granted
  void Add(const WindowCounts& other);
};

class WindowSimulator {
 public:
  explicit WindowSimulator(uint64_t seed);

  // Returns "" or a violation.
  std::string Run(int operations);
  const WindowCounts& counts() const { return counts_; }
  uint64_t hash() const { return hash_; }

 private:
  // An export, and the sequence that an import of it makes.
  struct Exported {
    MovedPages moved;
    WindowText text;
  };
  struct Member {
    scheduler::SequenceId id = 0;
    int start = 0, rows = 0, offset = 0;
    std::vector<std::vector<uint64_t>> row_keys, entry_keys;  // keys of the step's rows and
                                                              // entries, by layer
  };
  struct Step {
    scheduler::StepId id = 0;
    std::vector<Member> members;
    int total = 0;
    std::vector<int> sent;  // rows, by layer
  };
  // The rows and entries that a row of a request attends to.
  struct Seen {
    std::vector<uint64_t> keys;
  };
  struct Pending {
    std::unique_ptr<scheduler::testing::TestRequest> request;
    scheduler::StepId step = 0;
    uint64_t q_key = 0;
    std::vector<Seen> rows;
    std::vector<int32_t> list, list_begin;
  };

  uint64_t Pick(uint64_t below);
  bool Chance(int percent) { return Pick(100) < static_cast<uint64_t>(percent); }
  static scheduler::testing::HarnessOptions Options(uint64_t seed);
  const scheduler::ModelSpec& model() const { return harness_->model(); }

  // Returns true if it had an effect.
  bool Operate();
  bool Open();
  bool Fork();
  bool Truncate();
  bool Release();
  bool Export();
  bool Import();
  bool Begin();
  bool Attend();
  // Sends the next `rows` rows of a layer.
  void Send(Step* step, int layer, int rows);
  // Adds the row of the step at `offset`; returns the entries that it completes.
  uint64_t AddRow(Member* member, int layer, std::vector<uint64_t>* whole);
  Seen SeenBy(const Member& member, int layer, bool listed, Pending* pending);
  bool End();
  bool Abort();
  void Answer();
  void Check(const Pending& pending);
  void CheckRow(const Pending& pending, int row, int head);
  void CheckBooks();
  void Finish();

  WindowText* AnyText(bool free);
  WindowText* Find(scheduler::SequenceId id);
  // `tails` are the values of each member's tail; 0: none was sent.
  void Close(size_t step, const std::vector<int>* committed, const std::vector<int>& tails = {});
  void CheckTails();
  void Fail(const std::string& what);

  uint64_t random_;
  std::unique_ptr<scheduler::testing::EngineHarness> harness_;
  std::vector<float> sinks_;
  scheduler::StreamId stream_ = 0;
  scheduler::StepId last_step_ = 0;
  uint64_t key_ = 0;
  bool forked_ = false;  // pages may be shared
  std::vector<WindowText> texts_;
  std::vector<Exported> exports_;
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<Pending>> pending_;
  std::string violation_;
  uint64_t hash_ = 0xcbf29ce484222325u;
  WindowCounts counts_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_WINDOWS_WINDOW_SIMULATOR_H_
