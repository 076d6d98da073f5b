// Takes sequences of a model with a window out of a simulated engine, and puts them into it, as
// exports, imports and restores do: the groups of their entries, those of the window, the tail.
#ifndef MLA_TESTS_SIMULATION_WINDOWS_WINDOW_MOVES_H_
#define MLA_TESTS_SIMULATION_WINDOWS_WINDOW_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::simulation {

// What has been taken out. It holds nothing of the engine.
struct MovedPages {
  scheduler::MovingPages pages;
  std::vector<std::vector<std::byte>> entries, window;  // payloads by group
  uint8_t tail = 0;                                     // each byte of it, if there is one
};

class WindowMoves {
 public:
  // Moves parts of at most `part_bytes`, or single rows. REQUIRES: the harness outlives this.
  WindowMoves(scheduler::testing::EngineHarness* harness, int64_t part_bytes)
      : harness_(*harness), part_bytes_(part_bytes) {}

  absl::StatusOr<MovedPages> Out(const scheduler::ExportArgs& args);
  // As a new sequence; with `restored_id`, as the one with this id. CANCELLED if it gives up when
  // the rows have moved.
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
