// Fills the arrays of a plan in one walk over the tiles. Part of the planner, not for others.
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
#include "scheduler/planning/metadata_buffers.h"
#include "scheduler/planning/plan_tiles.h"

namespace mla::scheduler {

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
    at_.item = buffers.work_info().data();
    at_.unit_end = buffers.work_indptr().data();
    at_.partial = buffers.reduce_partial_map().data();
    at_.final_map = buffers.reduce_final_map().data();
    at_.reduce_end = buffers.reduce_indptr().data();
    last_unit_end_ = at_.unit_end + units_ - 1;
    *at_.unit_end = 0;
    *at_.reduce_end = 0;
    OpenUnit(at_, 0);
  }

  void Place(const Tile& tile) {
    if constexpr (kFixed) {
      PlaceFixed(at_, tile);
    } else {
      PlaceBalanced(at_, tile);
    }
  }

  // Segments of one tile at most each. Most tiles go into the open unit whole.
  void PlaceOnlyTiles(std::span<const PlanSegment> segments)
    requires(!kFixed)
  {
    Cursor at = at_;
    const auto count = static_cast<int32_t>(segments.size());
    for (int32_t i = 0; i < count; ++i) {
      const PlanSegment& segment = segments[static_cast<size_t>(i)];
      if (segment.q_rows == 0) [[unlikely]]
        continue;
      if (at.room >= segment.kv_rows + overhead_) {
        *at.item++ = {i, kernels::kUnsplit, 0, segment.q_rows,
                      0, segment.kv_rows,   0, kernels::PackHeads(0, segment.num_heads)};
        at.room -= segment.kv_rows + overhead_;
      } else {
        PlaceBalanced(at, OnlyTile(segment, i));
      }
    }
    at_ = at;
  }

  // Closes all units. The view lacks a generation.
  kernels::PlanView Finish() {
    NoteUnit(at_);
    const auto items = static_cast<int32_t>(at_.item - buffers_.work_info().data());
    std::fill(at_.unit_end + 1, last_unit_end_ + 2, items);
    const auto tiles = at_.final_map - buffers_.reduce_final_map().data();
    const auto partials = at_.partial - buffers_.reduce_partial_map().data();
    return buffers_.View({units_, items, tiles, partials, at_.partial_row});
  }

  // Charge of the KV rows only, without overheads.
  int64_t busiest_charge() const { return busiest_charge_; }

 private:
  // State that changes from item to item; a value, so that a loop can keep it in registers.
  struct Cursor {
    kernels::WorkInfo* item;
    int32_t* unit_end;  // entry of work_indptr that the open unit begins at; the next ends it
    int32_t* partial;
    kernels::ReduceTile* final_map;
    int32_t* reduce_end;
    int64_t room;  // charge that the open unit can still take
    int32_t partial_row = 0;
  };

  static int64_t DivideUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

  int64_t Charge(const Tally& tally) const {
    return tally.kv_charge + (kFixed ? tally.pieces : tally.tiles) * overhead_;
  }

  // The lesser of two charges a unit, either of which lets the units hold everything.
  int64_t BalancedPayload(const Tally& tally, const kernels::PlanTraits& traits,
                          int32_t sharing) const {
    if (tally.tiles == 0) return 0;
    // Every unit advances by its part of the whole: the excess over its share pays for the item
    // that its cut adds and for rounding the cut down.
    const int64_t slack = int64_t{granularity_} * ChargeScale(traits) - 1;
    const int64_t by_share = DivideUp(Charge(tally), sharing) + overhead_ + slack;
    // Every tile gets as many units of its own, or every unit as many whole tiles, as if all were
    // as long as the longest: in a batch of equals, cuts then fall on tile borders.
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
    // A piece far below the overhead costs more in the merge than it saves.
    return std::max(std::min(by_share, by_border), overhead_ + overhead_ / 4);
  }

  void OpenUnit(Cursor& at, int64_t carried) {
    // The last unit takes whatever is left.
    at.room = at.unit_end == last_unit_end_ ? kUnbounded : payload_ + carried;
    room_at_open_ = at.room;
  }

  void NoteUnit(const Cursor& at) {
    const int64_t items = at.item - (buffers_.work_info().data() + *at.unit_end);
    busiest_charge_ = std::max(busiest_charge_, room_at_open_ - at.room - overhead_ * items);
  }

  void NextUnit(Cursor& at) {
    NoteUnit(at);
    *++at.unit_end = static_cast<int32_t>(at.item - buffers_.work_info().data());
    OpenUnit(at, kFixed ? at.room : 0);
  }

  void Emit(Cursor& at, const Tile& tile, int32_t kv_begin, int32_t kv_end, int32_t partial_row) {
    *at.item++ = {tile.segment,
                  partial_row,
                  tile.q_begin,
                  tile.q_end,
                  kv_begin,
                  kv_end,
                  tile.segment_rows - kv_end,
                  tile.heads};
    at.room -= int64_t{kv_end - kv_begin} * tile.weight + overhead_;
  }

  void EmitPartial(Cursor& at, const Tile& tile, int32_t kv_begin, int32_t kv_end) {
    Emit(at, tile, kv_begin, kv_end, at.partial_row);
    *at.partial++ = at.partial_row;
    at.partial_row += tile.packed_rows;
  }

  // The piece from kv_begin to the end of the tile, and a reduce tile if others went before it.
  void EmitLast(Cursor& at, const Tile& tile, int32_t kv_begin) {
    if (kv_begin == 0) {
      Emit(at, tile, 0, tile.kv_end, kernels::kUnsplit);
      return;
    }
    EmitPartial(at, tile, kv_begin, tile.kv_end);
    *at.final_map++ = {tile.segment, tile.q_begin, tile.q_end, tile.heads};
    *++at.reduce_end = static_cast<int32_t>(at.partial - buffers_.reduce_partial_map().data());
  }

  [[gnu::always_inline]] void PlaceBalanced(Cursor& at, const Tile& tile) {
    int32_t begin = 0;
    while (at.room < int64_t{tile.kv_end - begin} * tile.weight + overhead_) {
      const int64_t end = begin + (at.room - overhead_) / tile.weight;
      const int32_t cut = end > begin ? RoundDown(static_cast<uint32_t>(end)) : begin;
      if (cut > begin) {
        if (cut >= tile.first_sees) break;  // only the causal tail is left: it stays in one piece
        EmitPartial(at, tile, begin, cut);
        begin = cut;
      }
      NextUnit(at);
    }
    EmitLast(at, tile, begin);
  }

  int32_t RoundDown(uint32_t kv_row) const {
    const uint32_t mask = granularity_ - 1;  // divisions would be half of the cost of a cut
    const uint32_t past = (granularity_ & mask) == 0 ? kv_row & mask : kv_row % granularity_;
    return static_cast<int32_t>(kv_row - past);
  }

  void PlaceFixed(Cursor& at, const Tile& tile) {
    int32_t begin = 0;
    for (int32_t pieces = PiecesOf(tile, split_rows_); pieces > 1; --pieces) {
      SkipFullUnits(at, int64_t{split_rows_} * tile.weight);
      EmitPartial(at, tile, begin, begin + split_rows_);
      begin += split_rows_;
    }
    SkipFullUnits(at, int64_t{tile.kv_end - begin} * tile.weight);
    EmitLast(at, tile, begin);
  }

  // A piece goes to the unit that holds the middle of its charge.
  void SkipFullUnits(Cursor& at, int64_t kv_charge) {
    while (2 * at.room < kv_charge + overhead_) NextUnit(at);
  }

  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;

  MetadataBuffers& buffers_;
  const int32_t units_;
  const uint32_t granularity_;
  const int64_t overhead_;
  const int32_t split_rows_;
  int32_t* last_unit_end_;
  int64_t payload_;
  Cursor at_;
  int64_t room_at_open_ = 0;
  int64_t busiest_charge_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_PLAN_WRITER_H_
