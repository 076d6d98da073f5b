// What a sequence of a model with a window holds, as the simulation foretells it.
#ifndef MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_
#define MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_

#include <cstdint>
#include <vector>

#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {

// Of a layer whose entries are whole at so many positions.
int EntriesAt(const scheduler::ModelSpec& model, int layer, int positions);
// Rows of a sequence so long that its window has passed, in whole pages.
int RowsPassed(const scheduler::ModelSpec& model, int length);

// Rows and entries by the keys that they are made from.
struct WindowText {
  scheduler::SequenceId id = 0;
  uint64_t epoch = 0;
  bool in_step = false;
  int gone = 0;                                // rows that are no longer kept, in whole pages
  int tail_at = 0;                             // position of its tail
  int tail = 0;                                // of which each byte is this; 0: there is none
  std::vector<std::vector<uint64_t>> rows;     // by layer
  std::vector<std::vector<uint64_t>> entries;  // by layer

  int length() const { return static_cast<int>(rows[0].size()); }
  // Rows before `length` are there as far as a window reaches.
  bool Kept(const scheduler::ModelSpec& model, int length) const {
    return gone == 0 || length >= gone + model.window;
  }
  void CutTo(const scheduler::ModelSpec& model, int length);
};

// How far, at most, a row's answer is from attention in double over the keys: its output, and its
// log-sum-exp. NaN: 1.
double ErrorOf(const scheduler::testing::TestRequest& request, size_t packed_row,
               const std::vector<uint64_t>& keys, uint64_t q_key, int dim, double scale,
               double sink);

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_WINDOWS_WINDOW_TEXT_H_
