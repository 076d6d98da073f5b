// Turns a plan of the expanded form into rounds of work for the device.
//
// Keys and values of a launch may not fit the workspace at once, so it is worked through in rounds:
// each round up-projects some segments (rows of a request for some heads, see
// common/expanded_args.h) and then attends to them. Heads are divided over rounds first; only where
// the context of one head alone exceeds the workspace is the context cut too, and results go on
// from round to round through rows of the partial buffers.
//
//   round 0: expand {request 0, heads 0..63}    attend its tiles
//   round 1: expand {request 0, heads 64..127}  attend its tiles
//
// Inside a round, items are dealt to the units by their cost: longest first among the heads whose
// keys and values share the cache, to the unit that has least. The plan's own cuts are kept only
// where whole tiles would leave units idle for longer than merging partial tiles takes; else tiles
// are joined again and there is nothing to combine.
//
// Threading: one thread. Build allocates nothing.
#ifndef MLA_KERNELS_HIP_EXPANDED_PLAN_H_
#define MLA_KERNELS_HIP_EXPANDED_PLAN_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_params.h"
#include "kernels/hip/common/expanded_args.h"

namespace mla::gpu {

struct ExpandedPlanOptions {
  int32_t units = 1;            // blocks that items are dealt to
  int64_t max_items = 0;        // of all rounds together
  int32_t max_segments = 0;     // of all rounds together
  int32_t max_requests = 0;     // of a launch
  int32_t first_carry_row = 0;  // rows of the partial buffers that carry results between rounds:
  int32_t carry_rows = 0;       // [first_carry_row, first_carry_row + carry_rows)
  // At least WorkspaceLeast(): one head of kExpandedRows rows.
  int64_t workspace_bytes = 0;
  int64_t cache_bytes = int64_t{24} << 20;  // of keys and values that are attended to at a time
};

class ExpandedPlan final {
 public:
  struct Round {
    int32_t first_segment = 0, segments = 0;
    int32_t first_indptr = 0;  // into unit_indptr(): units + 1 entries, which count all items
    int32_t pairs = 0;         // (tile of rows, head) pairs to up-project
    int32_t heads = 0;         // of all segments
  };

  static constexpr int64_t WorkspaceLeast() {
    return int64_t{kExpandedRows} * kPanelRowBytes * (kPanelsPerHead + kRotatedPanels) + kRestBytes;
  }

  // ExpandArgs::first_tile_pairs of a round that `blocks` blocks up-project: a list of their own
  // pays once a block has so many pairs that a further tile of rows does not count.
  static int32_t FirstTilePairs(const Round& round, int32_t blocks) {
    constexpr int32_t kPairsOfBlock = 12;
    return round.pairs >= kPairsOfBlock * blocks ? round.heads : 0;
  }

  // Device memory that rounds(), segments(), items() and unit_indptr() take at most.
  static int64_t MetadataBytes(const ExpandedPlanOptions& options);

  // INVALID_ARGUMENT names the option.
  static absl::StatusOr<std::unique_ptr<ExpandedPlan>> Create(const ExpandedPlanOptions& options);

  // RESOURCE_EXHAUSTED names the array, what is needed and the limit. `plan` and `requests` are not
  // kept.
  absl::Status Build(const kernels::PlanView& plan,
                     std::span<const kernels::RequestRecord> requests);

  // Of the last Build.
  std::span<const Round> rounds() const { return rounds_; }
  std::span<const ExpandSegment> segments() const { return segments_; }
  std::span<const ExpandedItem> items() const { return items_; }
  std::span<const int32_t> unit_indptr() const { return unit_indptr_; }
  // Whether partial tiles of the plan are left to combine.
  bool split() const { return split_; }
  int32_t units() const { return options_.units; }

 private:
  // Query rows of one head over KV rows, with where their result goes.
  struct Tile {
    int32_t request, q_begin, q_end, head, kv_begin, kv_end, partial_row;
  };
  struct Entry {  // a tile in one segment, in the order of dealing
    uint64_t key;
    int32_t tile, segment;
  };
  struct Placed {  // where a request's heads and rows lie
    int32_t first_segment = 0;
    int32_t heads_per_segment = 0;
    int32_t rows_per_chunk = 0;  // of a cut context; else 0
  };
  struct Load {
    int64_t cost;
    int32_t unit;
  };

  explicit ExpandedPlan(const ExpandedPlanOptions& options) : options_(options) {}
  absl::Status PlaceSegments(std::span<const kernels::RequestRecord> requests);
  absl::Status PlaceRequest(int32_t index, const kernels::RequestRecord& request, int64_t& used);
  absl::Status AddSegment(const ExpandSegment& segment, bool new_round, int64_t& used);
  bool KeepsPieces(const kernels::PlanView& plan) const;
  absl::Status CollectWhole(const kernels::PlanView& plan,
                            std::span<const kernels::RequestRecord> requests);
  absl::Status AddTiles(const kernels::RequestRecord& record, int32_t request, int32_t q_begin,
                        int32_t q_end, int32_t head_begin, int32_t head_end);
  absl::Status CollectPieces(const kernels::PlanView& plan);
  absl::Status AddTile(const Tile& tile);
  absl::Status Deal();
  absl::Status AddEntries(int32_t tile_index);
  absl::Status AddEntry(int32_t tile_index, int32_t segment);
  int32_t RoundOf(const Entry& entry) const { return static_cast<int32_t>(entry.key >> 48); }
  ExpandedItem MakeItem(const Entry& entry) const;

  ExpandedPlanOptions options_;
  bool split_ = false;
  // Of the last Deal, all rounds together: mean cost of a unit, and of the busiest beyond it.
  int64_t busy_ = 0, idle_ = 0;
  std::vector<Round> rounds_;
  std::vector<ExpandSegment> segments_;
  std::vector<int32_t> round_of_segment_, section_of_segment_;
  std::vector<Placed> placed_;
  std::vector<Tile> tiles_;
  std::vector<Entry> entries_;
  std::vector<int32_t> unit_of_entry_;
  std::vector<Load> loads_;
  std::vector<ExpandedItem> items_;
  std::vector<int32_t> unit_indptr_;
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_EXPANDED_PLAN_H_
