// Cuts segments into tiles for the planner. Part of the planner, not for others.
#ifndef MLA_SCHEDULER_PLANNING_PLAN_TILES_H_
#define MLA_SCHEDULER_PLANNING_PLAN_TILES_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention_backend.h"
#include "kernels/types/work_info.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

// One tile of a segment, with the numbers that decide where it is cut.
struct Tile {
  int32_t segment;
  int32_t q_begin, q_end;
  uint32_t heads;        // as in WorkInfo
  int32_t packed_rows;   // query rows x heads
  int32_t segment_rows;  // kv rows of the whole segment
  int32_t kv_end;        // end of the rows that its last query row sees
  int32_t first_sees;    // end of the rows that its first query row sees; every cut lies before it
  int32_t weight;        // charge of one KV row, in units of 1 / ChargeScale
};

struct TileShape {  // the largest tile of a segment; depends only on its heads and the traits
  int32_t heads;
  int32_t q_rows;
};

// Charges are integers: this is the charge of one KV row in a full tile.
inline int32_t ChargeScale(const kernels::PlanTraits& traits) {
  return traits.min_charged_rows > 0 ? traits.tile_rows : 1;
}

inline int32_t WeightOf(int32_t packed_rows, const kernels::PlanTraits& traits) {
  return traits.min_charged_rows > 0 ? std::max(packed_rows, traits.min_charged_rows) : 1;
}

inline int32_t HeadLimit(const kernels::PlanTraits& traits) {
  return traits.max_heads_per_tile == 0 ? traits.tile_rows
                                        : std::min(traits.max_heads_per_tile, traits.tile_rows);
}

inline int32_t QueryRowLimit(const kernels::PlanTraits& traits) {
  return traits.max_q_rows_per_tile == 0 ? traits.tile_rows : traits.max_q_rows_per_tile;
}

inline TileShape ShapeOf(int32_t num_heads, const kernels::PlanTraits& traits) {
  const int32_t heads = std::min(num_heads, HeadLimit(traits));
  return {heads, std::min(traits.tile_rows / heads, QueryRowLimit(traits))};
}

// Returns the tile of a segment that has at most one, if all tiles are charged alike. REQUIRES:
// q_rows > 0.
inline Tile OnlyTile(const PlanSegment& segment, int32_t index) {
  return {index,
          0,
          segment.q_rows,
          kernels::PackHeads(0, segment.num_heads),
          segment.q_rows * segment.num_heads,
          segment.kv_rows,
          segment.kv_rows,
          segment.causal ? segment.kv_rows - segment.q_rows + 1 : segment.kv_rows,
          1};
}

// Calls visit(tile) for the tiles of one segment, with query rows in the outer loop and head ranges
// in the inner one. Tiles next to each other then read the same KV rows.
template <typename Visit>
void ForEachTile(const PlanSegment& segment, int32_t index, const kernels::PlanTraits& traits,
                 Visit&& visit) {
  const int32_t q_rows = segment.q_rows;
  const int32_t heads = segment.num_heads;
  const TileShape shape = ShapeOf(heads, traits);
  const int32_t unseen = segment.causal ? q_rows - segment.kv_rows : 0;
  for (int32_t q = 0; q < q_rows;) {
    const int32_t q_end = q_rows - q > shape.q_rows ? q + shape.q_rows : q_rows;
    const int32_t kv_end = segment.causal ? std::max(0, q_end - unseen) : segment.kv_rows;
    const int32_t first_sees = segment.causal ? q + 1 - unseen : segment.kv_rows;
    for (int32_t head = 0; head < heads;) {
      const int32_t head_end = std::min(head + shape.heads, heads);
      const int32_t packed_rows = (q_end - q) * (head_end - head);
      visit(Tile{index, q, q_end, kernels::PackHeads(head, head_end), packed_rows, segment.kv_rows,
                 kv_end, first_sees, WeightOf(packed_rows, traits)});
      head = head_end;
    }
    q = q_end;
  }
}

// Returns the number of rows between the cuts in fixed-split mode: the trait, rounded up to the
// granularity.
inline int32_t SplitRows(const kernels::PlanTraits& traits) {
  const int64_t granularity = traits.kv_granularity;
  const int64_t rows = (traits.fixed_split_rows + granularity - 1) / granularity * granularity;
  return static_cast<int32_t>(std::min<int64_t>(rows, std::numeric_limits<int32_t>::max()));
}

// Returns the number of pieces of a tile in fixed-split mode.
inline int32_t PiecesOf(const Tile& tile, int32_t split_rows) {
  return tile.first_sees > 0 ? 1 + (tile.first_sees - 1) / split_rows : 1;
}

// Totals of a batch, counted before anything is written.
struct Tally {
  int64_t tiles = 0;
  int64_t kv_charge = 0;  // for the KV rows of all tiles
  int64_t kv_most = 0;    // for one tile
  int64_t kv_least = std::numeric_limits<int64_t>::max();
  // Set in fixed-split mode only, where the number of pieces is known beforehand.
  int64_t pieces = 0;
  int64_t split_tiles = 0;
  int64_t partials = 0;
  int64_t partial_rows = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_PLAN_TILES_H_
