// Turns the lengths of a batch into an execution plan, which says which unit computes which piece
// of which tile and which pieces are merged afterwards. Runs on the host and uses only lengths
// known there; planning never copies anything from a device.
//
// A segment of q_rows x num_heads packed rows is cut into tiles of at most traits.tile_rows packed
// rows: whole query rows when all heads fit, else one query row and a range of heads. A tile needs
// the KV rows that its last query row can see (causal trim). A tile that sees no rows still gets a
// work item, so that its output rows are written. Tiles are laid end to end in segment order. Each
// is charged its KV rows (or its packed rows, if traits.min_charged_rows asks for it) plus
// traits.item_overhead_rows. The line is cut into `units` parts of equal charge, where each cut
// pays for the work item that it adds. A tile that crosses a cut is split: its pieces become
// partial tiles and one reduce tile. Every cut lies within the rows that the tile's first query row
// can see, so no piece is completely masked for a row that sees any key.
//
// In fixed-split mode (traits.fixed_split_rows) the cuts are multiples of that many rows in every
// tile and whole pieces are dealt to the units in order: the pieces of one segment do not depend on
// other segments.
//
// In dealt mode (traits.dealt_pieces) all tiles are also cut at multiples of one number of rows,
// which follows from the batch. Pieces are dealt to the units in turn (dealt_plan.h).
//
// Threading: one thread uses a Planner. Build allocates nothing unless it fails.
#ifndef MLA_SCHEDULER_PLANNING_PLANNER_H_
#define MLA_SCHEDULER_PLANNING_PLANNER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/work_info.h"

namespace mla::scheduler {

struct PlanSegment {
  int32_t q_rows = 0;     // >= 0; a segment with 0 is padding and yields no work
  int32_t kv_rows = 0;    // rows that the last query row sees, >= 0
  int32_t num_heads = 1;  // 1 .. 65535
  bool causal = true;
  friend bool operator==(const PlanSegment&, const PlanSegment&) = default;
};

// Bounds of any batch that Build may see.
struct PlanLimits {
  int32_t segments = 0;
  int32_t q_rows = 0;         // all segments together
  int64_t packed_rows = 0;    // sum of q_rows x num_heads
  int32_t kv_rows = 0;        // of one segment; used in fixed-split mode only
  int32_t min_heads = 1;      // fewest heads of any segment
  int32_t max_heads = 65535;  // most heads of any segment
};

struct PlanCapacity {
  int64_t units = 0;
  int64_t work_items = 0;
  int64_t reduce_tiles = 0;
  int64_t reduce_partials = 0;
  int64_t partial_rows = 0;  // packed rows of the partial buffers
  // Returns the number of host bytes of a MetadataBuffers with this capacity.
  int64_t bytes() const;
  friend bool operator==(const PlanCapacity&, const PlanCapacity&) = default;
};

// Holds the five arrays of an execution plan, preallocated. One MetadataBuffers holds one plan; the
// engine owns several and never refills one that a running launch still reads.
class MetadataBuffers final {
 public:
  // The memory comes from backend.AllocateHost, so that device copies reach it directly.
  // INVALID_ARGUMENT names a capacity that is out of range: units must be at least 1, the others at
  // least 0, all below 2^31.
  static absl::StatusOr<std::unique_ptr<MetadataBuffers>> Create(
      const PlanCapacity& capacity, kernels::AttentionBackend& backend);
  // Creates the buffers in the given memory of at least capacity.bytes().
  static absl::StatusOr<std::unique_ptr<MetadataBuffers>> Create(
      const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory);

  const PlanCapacity& capacity() const { return capacity_; }
  // work_indptr has capacity().units + 1 entries, reduce_indptr capacity().reduce_tiles + 1.
  std::span<int32_t> work_indptr() { return work_indptr_; }
  std::span<kernels::WorkInfo> work_info() { return work_info_; }
  std::span<int32_t> reduce_indptr() { return reduce_indptr_; }
  std::span<kernels::ReduceTile> reduce_final_map() { return reduce_final_map_; }
  std::span<int32_t> reduce_partial_map() { return reduce_partial_map_; }
  // Returns a view of the filled part, without a generation. REQUIRES: within capacity().
  kernels::PlanView View(const PlanCapacity& filled) const;

 private:
  MetadataBuffers(const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory);

  PlanCapacity capacity_;
  std::unique_ptr<kernels::HostBuffer> memory_;
  std::span<int32_t> work_indptr_;
  std::span<kernels::WorkInfo> work_info_;
  std::span<int32_t> reduce_indptr_;
  std::span<kernels::ReduceTile> reduce_final_map_;
  std::span<int32_t> reduce_partial_map_;
};

class Planner final {
 public:
  // Returns the number of KV rows between the cuts of fixed-split mode: traits.fixed_split_rows,
  // rounded up to the granularity. A tile of `kv_rows` rows has at most DivideUp(kv_rows,
  // SplitRows) pieces.
  static int32_t SplitRows(const kernels::PlanTraits& traits);

  // Returns the capacity of every array for any batch within `limits`: it runs the counting pass of
  // Build itself on the worst batches, so that sizing and use cannot drift apart. REQUIRES: limits
  // and traits in the ranges that their comments state. In fixed-split mode the worst batch has
  // every segment at limits.kv_rows, so the result may be extremely large. A caller may lower it,
  // and must then cut its batch when Build returns RESOURCE_EXHAUSTED.
  static PlanCapacity Capacity(const PlanLimits& limits, const kernels::PlanTraits& traits);

  // Fills `buffers` and returns views into it. RESOURCE_EXHAUSTED names the array, the needed and
  // the available size; it cannot occur within the limits that the buffers were sized for.
  // INVALID_ARGUMENT names the segment or trait. Each plan has a generation of its own, unique in
  // the process and above 0.
  absl::StatusOr<kernels::PlanView> Build(std::span<const PlanSegment> segments,
                                          const kernels::PlanTraits& traits,
                                          MetadataBuffers& buffers);

  // Returns the charged KV rows of the busiest unit divided by their mean over all units, of the
  // last plan; 1.0 if balanced.
  double last_imbalance() const { return last_imbalance_; }

 private:
  double last_imbalance_ = 1.0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_PLANNER_H_
