// Cuts segments into tiles, and fills the arrays of a plan in one walk over these. Part of the
// planner, not for others.
//
// The writer keeps pointers to the next element of each array, and the remaining room of the open
// unit. The arrays must have the sizes that the tally asks for; the planner has checked this.
#ifndef MLA_SCHEDULER_PLANNING_PLAN_WRITER_H_
#define MLA_SCHEDULER_PLANNING_PLAN_WRITER_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/attention_backend.h"
#include "kernels/types/attention_params.h"
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

template <bool kFixed>
class PlanWriter final {
 public:
  // `sharing`: the number of units that the work is cut for.
  PlanWriter(const kernels::PlanTraits& traits, const Tally& tally, int32_t sharing,
             MetadataBuffers& buffers)
      : buffers_(buffers),
        units_(traits.units),
        granularity_(static_cast<uint32_t>(traits.kv_granularity)),
        overhead_(int64_t{traits.item_overhead_rows} * ChargeScale(traits)),
        split_rows_(SplitRows(traits)) {
    payload_ = kFixed ? DivideUp(Charge(tally), units_) : BalancedPayload(tally, traits, sharing);
    cursor_.item = buffers.work_info().data();
    cursor_.unit_end = buffers.work_indptr().data();
    cursor_.partial = buffers.reduce_partial_map().data();
    cursor_.final_map = buffers.reduce_final_map().data();
    cursor_.reduce_end = buffers.reduce_indptr().data();
    last_unit_end_ = cursor_.unit_end + units_ - 1;
    *cursor_.unit_end = 0;
    *cursor_.reduce_end = 0;
    OpenUnit(cursor_, 0);
  }

  void Place(const Tile& tile) {
    if constexpr (kFixed) {
      PlaceFixed(cursor_, tile);
    } else {
      PlaceBalanced(cursor_, tile);
    }
  }

  // Places segments of at most one tile each. Most tiles go into the open unit whole.
  void PlaceOnlyTiles(std::span<const PlanSegment> segments)
    requires(!kFixed)
  {
    Cursor cursor = cursor_;
    const auto count = static_cast<int32_t>(segments.size());
    for (int32_t i = 0; i < count; ++i) {
      const PlanSegment& segment = segments[static_cast<size_t>(i)];
      if (segment.q_rows == 0) [[unlikely]]
        continue;
      if (cursor.room >= segment.kv_rows + overhead_) {
        *cursor.item++ = {i, kernels::kUnsplit, 0, segment.q_rows,
                          0, segment.kv_rows,   0, kernels::PackHeads(0, segment.num_heads)};
        cursor.room -= segment.kv_rows + overhead_;
      } else {
        PlaceBalanced(cursor, OnlyTile(segment, i));
      }
    }
    cursor_ = cursor;
  }

  // Closes all units and returns the view; the caller sets its generation.
  kernels::PlanView Finish() {
    NoteUnit(cursor_);
    const auto items = static_cast<int32_t>(cursor_.item - buffers_.work_info().data());
    std::fill(cursor_.unit_end + 1, last_unit_end_ + 2, items);
    const auto tiles = cursor_.final_map - buffers_.reduce_final_map().data();
    const auto partials = cursor_.partial - buffers_.reduce_partial_map().data();
    return buffers_.View({units_, items, tiles, partials, cursor_.partial_row});
  }

  // Returns the charge of the KV rows only, without overheads.
  int64_t busiest_charge() const { return busiest_charge_; }

 private:
  // State that changes from item to item; a value, so that a loop can keep it in registers.
  struct Cursor {
    kernels::WorkInfo* item;
    int32_t* unit_end;  // where the open unit begins, in work_indptr; the next entry is its end
    int32_t* partial;
    kernels::ReduceTile* final_map;
    int32_t* reduce_end;
    int64_t room;  // charge that still fits into the open unit
    int32_t partial_row = 0;
  };

  static int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

  int64_t Charge(const Tally& tally) const {
    return tally.kv_charge + (kFixed ? tally.pieces : tally.tiles) * overhead_;
  }

  // Returns the charge that a unit may take: the smaller of two values, each of which lets the
  // units hold the whole batch.
  int64_t BalancedPayload(const Tally& tally, const kernels::PlanTraits& traits,
                          int32_t sharing) const {
    if (tally.tiles == 0) return 0;
    // Every unit advances by its part of the whole: the excess over its share pays for the item
    // that its cut adds and for rounding the cut down.
    const int64_t slack = int64_t{granularity_} * ChargeScale(traits) - 1;
    const int64_t by_share = DivideUp(Charge(tally), sharing) + overhead_ + slack;
    // Alternatively cut as if all tiles were as long as the longest. Each tile then gets the same
    // number of units, or each unit the same number of whole tiles. If all tiles are equal, cuts
    // fall on tile borders.
    int64_t by_border = by_share;
    const int64_t of_unit = DivideUp(tally.tiles, sharing);
    if (tally.tiles > sharing) {
      by_border = of_unit * (tally.kv_most + overhead_);
    } else if (ChargeScale(traits) == 1) {
      const int64_t piece = DivideUp(tally.kv_most, sharing / tally.tiles);
      by_border = DivideUp(piece, granularity_) * granularity_ + overhead_;
    }
    // If borders leave every tile whole, a merge is not needed; it would take about as long as an
    // item.
    const bool whole =
        2 * tally.tiles > sharing && of_unit * (tally.kv_most - tally.kv_least) <= overhead_;
    if (whole && by_border <= by_share + overhead_) return by_border;
    // A piece much smaller than the overhead costs more in the merge than it saves.
    return std::max(std::min(by_share, by_border), overhead_ + overhead_ / 4);
  }

  void OpenUnit(Cursor& cursor, int64_t carried) {
    // The last unit takes everything that is left.
    cursor.room = cursor.unit_end == last_unit_end_ ? kUnbounded : payload_ + carried;
    room_at_open_ = cursor.room;
  }

  void NoteUnit(const Cursor& cursor) {
    const int64_t items = cursor.item - (buffers_.work_info().data() + *cursor.unit_end);
    busiest_charge_ = std::max(busiest_charge_, room_at_open_ - cursor.room - overhead_ * items);
  }

  void NextUnit(Cursor& cursor) {
    NoteUnit(cursor);
    *++cursor.unit_end = static_cast<int32_t>(cursor.item - buffers_.work_info().data());
    OpenUnit(cursor, kFixed ? cursor.room : 0);
  }

  void Emit(Cursor& cursor, const Tile& tile, int32_t kv_begin, int32_t kv_end,
            int32_t partial_row) {
    *cursor.item++ = {tile.segment,
                      partial_row,
                      tile.q_begin,
                      tile.q_end,
                      kv_begin,
                      kv_end,
                      tile.segment_rows - kv_end,
                      tile.heads};
    cursor.room -= int64_t{kv_end - kv_begin} * tile.weight + overhead_;
  }

  void EmitPartial(Cursor& cursor, const Tile& tile, int32_t kv_begin, int32_t kv_end) {
    Emit(cursor, tile, kv_begin, kv_end, cursor.partial_row);
    *cursor.partial++ = cursor.partial_row;
    cursor.partial_row += tile.packed_rows;
  }

  // Adds the piece from kv_begin to the end of the tile. If other pieces of the tile went before
  // it, adds the reduce tile, too.
  void EmitLast(Cursor& cursor, const Tile& tile, int32_t kv_begin) {
    if (kv_begin == 0) {
      Emit(cursor, tile, 0, tile.kv_end, kernels::kUnsplit);
      return;
    }
    EmitPartial(cursor, tile, kv_begin, tile.kv_end);
    *cursor.final_map++ = {tile.segment, tile.q_begin, tile.q_end, tile.heads};
    *++cursor.reduce_end =
        static_cast<int32_t>(cursor.partial - buffers_.reduce_partial_map().data());
  }

  [[gnu::always_inline]] void PlaceBalanced(Cursor& cursor, const Tile& tile) {
    int32_t begin = 0;
    while (cursor.room < int64_t{tile.kv_end - begin} * tile.weight + overhead_) {
      const int64_t end = begin + (cursor.room - overhead_) / tile.weight;
      const int32_t cut = end > begin ? RoundDown(static_cast<uint32_t>(end)) : begin;
      if (cut > begin) {
        // Only the causal tail is left, which must stay in one piece.
        if (cut >= tile.first_sees) break;
        EmitPartial(cursor, tile, begin, cut);
        begin = cut;
      }
      NextUnit(cursor);
    }
    EmitLast(cursor, tile, begin);
  }

  int32_t RoundDown(uint32_t kv_row) const {
    const uint32_t mask = granularity_ - 1;  // divisions would be half of the cost of a cut
    const uint32_t past = (granularity_ & mask) == 0 ? kv_row & mask : kv_row % granularity_;
    return static_cast<int32_t>(kv_row - past);
  }

  void PlaceFixed(Cursor& cursor, const Tile& tile) {
    int32_t begin = 0;
    for (int32_t pieces = PiecesOf(tile, split_rows_); pieces > 1; --pieces) {
      SkipFullUnits(cursor, int64_t{split_rows_} * tile.weight);
      EmitPartial(cursor, tile, begin, begin + split_rows_);
      begin += split_rows_;
    }
    SkipFullUnits(cursor, int64_t{tile.kv_end - begin} * tile.weight);
    EmitLast(cursor, tile, begin);
  }

  // Moves the cursor to the unit that gets the next piece: the one in which the middle of its
  // charge falls.
  void SkipFullUnits(Cursor& cursor, int64_t kv_charge) {
    while (2 * cursor.room < kv_charge + overhead_) NextUnit(cursor);
  }

  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

  MetadataBuffers& buffers_;
  const int32_t units_;
  const uint32_t granularity_;
  const int64_t overhead_;
  const int32_t split_rows_;
  int32_t* last_unit_end_;
  int64_t payload_;
  Cursor cursor_;
  int64_t room_at_open_ = 0;
  int64_t busiest_charge_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_PLAN_WRITER_H_
