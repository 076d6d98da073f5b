// The predicted contents of a sequence of a model with a window.
#ifndef MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_
#define MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_

#include <cstdint>
#include <vector>

#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {

// Number of complete entries of a layer after `positions` positions.
int EntriesAt(const scheduler::ModelSpec& model, int layer, int positions);
// Rows of a sequence of this length that the window has passed, in whole pages.
int RowsPassed(const scheduler::ModelSpec& model, int length);

// Rows and entries by the keys that they are made from.
struct WindowText {
  scheduler::SequenceId id = 0;
  uint64_t epoch = 0;
  bool in_step = false;
  int gone = 0;                                // rows that are no longer kept, in whole pages
  int tail_at = 0;                             // position of its tail
  int tail = 0;                                // value of each of its bytes; 0: no tail
  std::vector<std::vector<uint64_t>> rows;     // by layer
  std::vector<std::vector<uint64_t>> entries;  // by layer

  int length() const { return static_cast<int>(rows[0].size()); }
  // Returns true if rows before `length` are kept as far as a window reaches.
  bool Kept(const scheduler::ModelSpec& model, int length) const {
    return gone == 0 || length >= gone + model.window;
  }
  void CutTo(const scheduler::ModelSpec& model, int length);
};

// Upper bound of the distance between a row's answer and attention in double over the keys, for its
// output and its log-sum-exp. NaN counts as 1.
double ErrorOf(const scheduler::testing::TestRequest& request, size_t packed_row,
               const std::vector<uint64_t>& keys, uint64_t q_key, int dim, double scale,
               double sink);

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_
