// One seed of the simulation of models with a window and compressed entries: the real engine over
// the reference backend, in one thread, under random operations on a few sequences: steps that end
// with some of their rows, or are aborted, several at a time; forks, truncation, releases; exports,
// and imports of them later, also under the id of before. What each row must attend to is kept
// apart, as lists of rows and entries by sequence and layer:
//
//   - an OK answer equals attention in double over the last rows, the whole entries or those of its
//     list, and the sink;
//   - forks, truncation and exports are granted just where the rows before are kept;
//   - what an import brings is the rows that the window reaches, all entries, and the tail;
//   - a tail is there, as it was sent, until rows before its position go;
//   - page groups in use are those of the rows and entries that there are, and none in the end.
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
  int64_t operations = 0;  // that did something
  int64_t answers = 0;     // rows and heads that were compared
  int64_t commits = 0, aborts = 0;
  int64_t passed = 0;  // refusals because the window has passed
  int64_t tails = 0;   // that were read, and were as foretold
  int64_t moves = 0;   // imports that were granted
  void Add(const WindowCounts& other);
};

class WindowSimulator {
 public:
  explicit WindowSimulator(uint64_t seed);

  // Empty, or what went wrong.
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
    std::vector<std::vector<uint64_t>> row_keys, entry_keys;  // of the step, by layer
  };
  struct Step {
    scheduler::StepId id = 0;
    std::vector<Member> members;
    int total = 0;
    std::vector<int> sent;  // rows, by layer
  };
  // What a row of a request attends to.
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

  // True if anything was done.
  bool Operate();
  bool Open();
  bool Fork();
  bool Truncate();
  bool Release();
  bool Export();
  bool Import();
  bool Begin();
  bool Attend();
  // The next `rows` rows of a layer.
  void Send(Step* step, int layer, int rows);
  // The row of the step at `offset`; returns the entries that it makes whole.
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
  // `tails`: the value of each member's; 0: none came.
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
