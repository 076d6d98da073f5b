// Exports sequences of a model with a window from a simulated engine, and imports or restores them:
// the groups of their entries, the groups of the window, and the tail.
#ifndef MLA_TESTS_SIMULATION_WINDOWS_WINDOW_MOVES_H_
#define MLA_TESTS_SIMULATION_WINDOWS_WINDOW_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {

// An export. It holds nothing of the engine.
struct MovedPages {
  scheduler::MovingPages pages;
  std::vector<std::vector<std::byte>> entries, window;  // payloads by group
  uint8_t tail = 0;                                     // value of each of its bytes, if there is
                                                        // one
};

class WindowMoves {
 public:
  // Moves parts of at most `part_bytes`, or single rows. REQUIRES: the harness outlives this.
  WindowMoves(scheduler::testing::EngineHarness* harness, int64_t part_bytes)
      : harness_(*harness), part_bytes_(part_bytes) {}

  absl::StatusOr<MovedPages> Out(const scheduler::ExportArgs& args);
  // Imports it as a new sequence or, with `restored_id`, as the one with this id. CANCELLED if it
  // gives up after the rows have moved.
  absl::StatusOr<scheduler::SequenceInfo> In(const MovedPages& moved, uint64_t restored_id,
                                             bool gives_up);

 private:
  using Payloads = std::vector<std::vector<std::byte>>;
  absl::Status MoveAll(const scheduler::MovingPages& pages, bool in, bool window,
                       Payloads* payloads);
  absl::Status MovePart(scheduler::PageMove* move);

  scheduler::testing::EngineHarness& harness_;
  const int64_t part_bytes_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_WINDOWS_WINDOW_MOVES_H_
