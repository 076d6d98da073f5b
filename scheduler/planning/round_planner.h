// Turns a plan of the expanded form into rounds of work for a device (kernels/types/round_info.h).
//
// Keys and values of a launch may not fit the workspace at once, so it is worked through in rounds:
// each round up-projects some expansions (rows of a segment for some heads) and then attends to
// them. Heads are divided over rounds first. Only if the context of one head alone exceeds the
// workspace, the context is cut too; results then pass from round to round through rows of the
// partial buffers.
//
// Inside a round, items are dealt to the units by their cost: longest first among the heads whose
// keys and values share the cache, to the unit that has least. The plan's own cuts are kept only if
// whole tiles would leave units idle for longer than merging partial tiles takes. Otherwise tiles
// are joined again, and combining is not needed.
//
// Threading: one thread. Build allocates nothing.
#ifndef MLA_SCHEDULER_PLANNING_ROUND_PLANNER_H_
#define MLA_SCHEDULER_PLANNING_ROUND_PLANNER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/round_info.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

// The most that the rounds of one plan may hold.
struct RoundCapacity {
  int32_t units = 0;  // 0: no rounds are made
  int64_t items = 0;  // of all rounds together, like expansions
  int64_t expansions = 0;
  int32_t segments = 0;
  // Returns the number of host bytes of RoundBuffers with this capacity.
  int64_t bytes() const;
};

// Holds the arrays of one plan's rounds, preallocated.
class RoundBuffers final {
 public:
  explicit RoundBuffers(const RoundCapacity& capacity);
  RoundBuffers(const RoundBuffers&) = delete;
  RoundBuffers& operator=(const RoundBuffers&) = delete;

 private:
  friend class RoundPlanner;
  std::vector<kernels::Round> rounds_;
  std::vector<kernels::Expansion> expansions_;
  std::vector<kernels::ExpandedItem> items_;
  std::vector<int32_t> unit_indptr_;
};

class RoundPlanner final {
 public:
  // The planner makes rounds of at most this capacity.
  explicit RoundPlanner(const RoundCapacity& capacity);

  // Makes the rounds of `plan`, which was made for `segments` and `traits`. The returned view
  // refers to `out`. INVALID_ARGUMENT names the trait that is out of range; RESOURCE_EXHAUSTED
  // names the array and its limit. Keeps no reference to `plan` and `segments`.
  absl::StatusOr<kernels::RoundView> Build(const kernels::PlanView& plan,
                                           std::span<const PlanSegment> segments,
                                           const kernels::PlanTraits& traits, RoundBuffers& out);

 private:
  // The query rows of one head over a range of KV rows, and the place of their result.
  struct Tile {
    int32_t segment, q_begin, q_end, head, kv_begin, kv_end, partial_row;
  };
  struct Entry {  // the part of a tile in one expansion; sorted in the order of dealing
    uint64_t key;
    int32_t tile, expansion;
  };
  struct Placed {  // place of a segment's heads and rows
    int32_t first_expansion = 0;
    int32_t heads_per_expansion = 0;
    int32_t rows_per_chunk = 0;  // if the context is cut; else 0
  };
  struct Load {
    int64_t cost;
    int32_t unit;
  };

  absl::Status PlaceExpansions(std::span<const PlanSegment> segments);
  absl::Status PlaceSegment(int32_t index, const PlanSegment& segment, int64_t& used);
  absl::Status AddExpansion(const kernels::Expansion& expansion, bool new_round, int64_t& used);
  bool KeepsPieces(const kernels::PlanView& plan) const;
  absl::Status CollectWhole(const kernels::PlanView& plan, std::span<const PlanSegment> segments);
  absl::Status AddTiles(const PlanSegment& record, int32_t segment, int32_t q_begin, int32_t q_end,
                        int32_t head_begin, int32_t head_end);
  absl::Status CollectPieces(const kernels::PlanView& plan);
  absl::Status AddTile(const Tile& tile);
  absl::Status Deal();
  absl::Status AddEntries(int32_t tile_index);
  absl::Status AddEntry(int32_t tile_index, int32_t expansion);
  int32_t RoundOf(const Entry& entry) const { return static_cast<int32_t>(entry.key >> 48); }
  kernels::ExpandedItem MakeItem(const Entry& entry) const;
  // Returns the number of bytes of a row of one head's keys and values.
  int64_t PanelsBytes() const { return int64_t{kernels::kPanelRowBytes} * traits_.dims.panels(); }

  const RoundCapacity capacity_;
  // State of the running Build.
  kernels::RoundTraits traits_;
  int32_t units_ = 1;
  RoundBuffers* out_ = nullptr;
  // Costs in the last Deal, over all rounds: mean cost of a unit, and the excess of the busiest
  // unit.
  int64_t busy_ = 0, idle_ = 0;
  std::vector<int32_t> round_of_expansion_, section_of_expansion_;
  std::vector<Placed> placed_;
  std::vector<Tile> tiles_;
  std::vector<Entry> entries_;
  std::vector<int32_t> unit_of_entry_;
  std::vector<Load> loads_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_ROUND_PLANNER_H_
