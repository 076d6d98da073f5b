// Fills the arrays of a plan in dealt mode. Part of the planner, not for others.
//
// Piece j of the batch, counted over all tiles in their order, goes to unit j mod units. So each
// unit has its items in the order of segments. A tile has at most as many pieces as there are
// units, so no unit has two of its pieces.
#ifndef MLA_SCHEDULER_PLANNING_DEALT_PLAN_H_
#define MLA_SCHEDULER_PLANNING_DEALT_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
#include "scheduler/planning/plan_writer.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

// Counts of rows over all tiles of a batch.
struct TileRows {
  int64_t tiles = 0;
  int64_t all = 0;      // KV rows
  int64_t longest = 0;  // of one tile
};

// Returns the number of KV rows between the cuts of a dealt plan. count(rows) must return the
// number of pieces if all tiles are cut at multiples of `rows`.
template <typename Count>
int32_t DealtRows(const TileRows& batch, const kernels::PlanTraits& traits, const Count& count) {
  constexpr int64_t kStep = 8;  // rows grow by one eighth until there are few enough pieces
  const int64_t granularity = traits.kv_granularity;
  const auto up = [granularity](int64_t rows) {
    return std::max<int64_t>(1, (rows + granularity - 1) / granularity) * granularity;
  };
  const auto bounded = [](int64_t rows) {
    return static_cast<int32_t>(std::min<int64_t>(rows, std::numeric_limits<int32_t>::max()));
  };
  const int64_t most_pieces = int64_t{traits.units} * traits.dealt_pieces;
  const int64_t whole = up(batch.longest);
  if (batch.tiles >= most_pieces) return bounded(whole);
  int64_t rows = up(std::max({batch.all / most_pieces, batch.longest / traits.units + 1,
                              int64_t{traits.item_overhead_rows}}));
  while (rows < whole && count(bounded(rows)) > most_pieces) rows += up(rows / kStep);
  return bounded(std::min(rows, whole));
}

class DealtWriter final {
 public:
  // REQUIRES: the arrays have room for `pieces`, which is the number of pieces of all tiles that
  // Place will get.
  DealtWriter(int32_t units, int64_t pieces, int32_t split_rows, MetadataBuffers& buffers)
      : buffers_(buffers), units_(units), pieces_(pieces), split_rows_(split_rows) {
    for (int32_t unit = 0; unit <= units; ++unit) {
      buffers_.work_indptr()[static_cast<size_t>(unit)] = static_cast<int32_t>(Begin(unit));
    }
    buffers_.reduce_indptr()[0] = 0;
  }

  void Place(const Tile& tile) {
    const int32_t pieces = PiecesOf(tile, split_rows_);
    for (int32_t piece = 0; piece < pieces; ++piece) {
      const int32_t begin = piece * split_rows_;
      const int32_t end = piece + 1 < pieces ? begin + split_rows_ : tile.kv_end;
      int32_t partial = kernels::kUnsplit;
      if (pieces > 1) {
        partial = partial_row_;
        partial_row_ += tile.packed_rows;
        buffers_.reduce_partial_map()[partials_++] = partial;
      }
      const auto unit = static_cast<int32_t>(placed_ % units_);
      buffers_.work_info()[static_cast<size_t>(Begin(unit) + placed_ / units_)] = {
          tile.segment, partial, tile.q_begin, tile.q_end, begin, end, tile.segment_rows - end,
          tile.heads};
      ++placed_;
    }
    if (pieces == 1) return;
    buffers_.reduce_final_map()[tiles_++] = {tile.segment, tile.q_begin, tile.q_end, tile.heads};
    buffers_.reduce_indptr()[tiles_] = static_cast<int32_t>(partials_);
  }

 private:
  // Returns the first item of a unit.
  int64_t Begin(int32_t unit) const {
    return unit * (pieces_ / units_) + std::min<int64_t>(unit, pieces_ % units_);
  }

  MetadataBuffers& buffers_;
  const int32_t units_;
  const int64_t pieces_;
  const int32_t split_rows_;
  int64_t placed_ = 0;
  size_t tiles_ = 0, partials_ = 0;
  int32_t partial_row_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_DEALT_PLAN_H_
