#include "scheduler/planner.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace mla::scheduler {
namespace {

using kernels::PlanTraits;
using kernels::ReduceTile;
using kernels::WorkInfo;

constexpr int32_t kMaxHeads = 65535;  // WorkInfo packs head bounds in 16 bits
constexpr int32_t kMaxTileRows = 1 << 16;
constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 2;

// How a request is cut into tiles; a function of its heads alone.
struct TileShape {
  int32_t heads;   // of a tile at most
  int32_t q_rows;  // of a tile at most
};

int32_t HeadLimit(const PlanTraits& traits) {
  return traits.max_heads_per_tile == 0 ? traits.tile_rows
                                        : std::min(traits.max_heads_per_tile, traits.tile_rows);
}

TileShape ShapeOf(int32_t num_heads, const PlanTraits& traits) {
  const int32_t heads = std::min(num_heads, HeadLimit(traits));
  return {heads, traits.tile_rows / heads};
}

// One tile of a request, as the cut sees it.
struct Tile {
  int32_t request;
  int32_t q_begin, q_end;
  uint32_t heads;
  int32_t packed_rows;
  int32_t request_kv_rows;
  int32_t kv_end;      // what its last query row sees
  int32_t first_sees;  // what its first query row sees; no cut lies at or past it
};

bool FitsOneTile(const PlanRequest& request, int32_t head_limit, int32_t tile_rows) {
  return request.num_heads <= head_limit &&
         static_cast<int64_t>(request.q_rows) * request.num_heads <= tile_rows;
}

// Calls visit(tile) for the tiles of one request: query rows outside, head ranges inside, so that
// neighbours read the same KV rows.
template <typename Visit>
inline void ForEachTile(const PlanRequest& request, int32_t index, int32_t head_limit,
                        const PlanTraits& traits, Visit&& visit) {
  Tile tile;
  tile.request = index;
  tile.request_kv_rows = request.kv_rows;
  if (FitsOneTile(request, head_limit, traits.tile_rows)) {
    if (request.q_rows == 0) return;
    tile.q_begin = 0;
    tile.q_end = request.q_rows;
    tile.heads = kernels::PackHeads(0, request.num_heads);
    tile.packed_rows = request.q_rows * request.num_heads;
    tile.kv_end = request.kv_rows;
    tile.first_sees = request.causal ? request.kv_rows - request.q_rows + 1 : request.kv_rows;
    visit(tile);
    return;
  }
  const TileShape shape = ShapeOf(request.num_heads, traits);
  const int32_t unseen = request.causal ? request.q_rows - request.kv_rows : 0;
  for (int32_t q = 0; q < request.q_rows; q = tile.q_end) {
    tile.q_begin = q;
    tile.q_end = request.q_rows - q > shape.q_rows ? q + shape.q_rows : request.q_rows;
    tile.kv_end = request.causal ? std::max(0, tile.q_end - unseen) : request.kv_rows;
    tile.first_sees = request.causal ? q + 1 - unseen : request.kv_rows;
    for (int32_t head = 0; head < request.num_heads; head += shape.heads) {
      const int32_t head_end = std::min(head + shape.heads, request.num_heads);
      tile.heads = kernels::PackHeads(head, head_end);
      tile.packed_rows = (tile.q_end - q) * (head_end - head);
      visit(tile);
    }
  }
}

// What a batch comes to, counted before anything is written.
struct Tally {
  int64_t tiles = 0;
  int64_t kv_rows = 0;  // of all tiles
  // Fixed-split mode only, exact; otherwise the cuts decide.
  int64_t pieces = 0;
  int64_t split_tiles = 0;
  int64_t partials = 0;
  int64_t partial_rows = 0;
};

int64_t PiecesOf(const Tile& tile, int32_t split_rows) {
  return tile.first_sees > 0 ? 1 + (tile.first_sees - 1) / split_rows : 1;
}

template <bool kFixed>
inline void Count(const PlanRequest& request, int32_t head_limit, const PlanTraits& traits,
                  int32_t split_rows, int64_t times, Tally& tally) {
  ForEachTile(request, 0, head_limit, traits, [&](const Tile& tile) {
    tally.tiles += times;
    tally.kv_rows += times * tile.kv_end;
    if constexpr (kFixed) {
      const int64_t pieces = PiecesOf(tile, split_rows);
      tally.pieces += times * pieces;
      if (pieces > 1) {
        tally.split_tiles += times;
        tally.partials += times * pieces;
        tally.partial_rows += times * pieces * tile.packed_rows;
      }
    }
  });
}

// Cut points are multiples of the granularity in both modes.
int32_t SplitRows(const PlanTraits& traits) {
  const int64_t g = traits.kv_granularity;
  const int64_t rounded = (traits.fixed_split_rows + g - 1) / g * g;
  return static_cast<int32_t>(std::min<int64_t>(rounded, std::numeric_limits<int32_t>::max()));
}

// Array lengths that suffice for a batch of this tally. A cut makes at most two partial tiles and
// there are units - 1 cuts.
PlanCapacity Needs(const Tally& tally, const PlanTraits& traits) {
  PlanCapacity needs;
  needs.units = traits.units;
  if (traits.fixed_split_rows > 0) {
    needs.work_items = tally.pieces;
    needs.reduce_tiles = tally.split_tiles;
    needs.reduce_partials = tally.partials;
    needs.partial_rows = tally.partial_rows;
    return needs;
  }
  const int64_t cuts = tally.tiles > 0 ? traits.units - 1 : 0;
  needs.work_items = tally.tiles + cuts;
  needs.reduce_tiles = std::min(tally.tiles, cuts);
  needs.reduce_partials = std::min(tally.tiles + cuts, 2 * cuts);
  needs.partial_rows = needs.reduce_partials * traits.tile_rows;
  return needs;
}

absl::Status Misfit(const char* array, int64_t needed, int64_t available) {
  return absl::ResourceExhaustedError(
      absl::StrCat("plan ", array, ": needs ", needed, ", limit ", available));
}

absl::Status CheckFits(const PlanCapacity& needs, const PlanCapacity& has) {
  if (needs.units > has.units) return Misfit("units", needs.units, has.units);
  if (needs.work_items > has.work_items) {
    return Misfit("work_items", needs.work_items, has.work_items);
  }
  if (needs.reduce_tiles > has.reduce_tiles) {
    return Misfit("reduce_tiles", needs.reduce_tiles, has.reduce_tiles);
  }
  if (needs.reduce_partials > has.reduce_partials) {
    return Misfit("reduce_partials", needs.reduce_partials, has.reduce_partials);
  }
  if (needs.partial_rows > has.partial_rows) {
    return Misfit("partial_rows", needs.partial_rows, has.partial_rows);
  }
  return absl::OkStatus();
}

absl::Status CheckTrait(const char* name, int64_t got, int64_t least, int64_t most) {
  if (got >= least && got <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("plan traits.", name, ": got ", got, ", limit ", least, "..", most));
}

absl::Status CheckTraits(const PlanTraits& traits) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
  if (auto s = CheckTrait("units", traits.units, 1, kMost); !s.ok()) return s;
  if (auto s = CheckTrait("tile_rows", traits.tile_rows, 1, kMaxTileRows); !s.ok()) return s;
  if (auto s = CheckTrait("max_heads_per_tile", traits.max_heads_per_tile, 0, kMost); !s.ok()) {
    return s;
  }
  if (auto s = CheckTrait("kv_granularity", traits.kv_granularity, 1, kMost); !s.ok()) return s;
  if (auto s = CheckTrait("item_overhead_rows", traits.item_overhead_rows, 0, kMost); !s.ok()) {
    return s;
  }
  return CheckTrait("fixed_split_rows", traits.fixed_split_rows, 0, kMost);
}

bool Valid(const PlanRequest& request) {
  return (request.q_rows | request.kv_rows) >= 0 &&
         static_cast<uint32_t>(request.num_heads) - 1u < static_cast<uint32_t>(kMaxHeads);
}

absl::Status Explain(const PlanRequest& request, size_t index) {
  const auto fault = [&](const char* field, int32_t got, const char* limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan requests[", index, "].", field, ": got ", got, ", limit ", limit));
  };
  if (request.q_rows < 0) return fault("q_rows", request.q_rows, "at least 0");
  if (request.kv_rows < 0) return fault("kv_rows", request.kv_rows, "at least 0");
  return fault("num_heads", request.num_heads, "1..65535");
}

// Fills the arrays in one walk over the tiles. `room_` is the charge that the open unit can still
// take.
template <bool kFixed>
class Writer {
 public:
  Writer(const PlanTraits& traits, const Tally& tally, MetadataBuffers& buffers)
      : units_(traits.units),
        granularity_(static_cast<uint32_t>(traits.kv_granularity)),
        overhead_(traits.item_overhead_rows),
        split_rows_(SplitRows(traits)),
        work_indptr_(buffers.work_indptr().data()),
        work_info_(buffers.work_info().data()),
        reduce_indptr_(buffers.reduce_indptr().data()),
        reduce_final_map_(buffers.reduce_final_map().data()),
        reduce_partial_map_(buffers.reduce_partial_map().data()) {
    // Every unit but the last advances by at least charge / units: what it gets beyond that pays
    // for the item that its cut adds and for rounding the cut down.
    const int64_t charge = tally.kv_rows + (kFixed ? tally.pieces : tally.tiles) * overhead_;
    payload_ = (charge + units_ - 1) / units_;
    if constexpr (!kFixed) payload_ += overhead_ + granularity_ - 1;
    work_indptr_[0] = 0;
    reduce_indptr_[0] = 0;
    OpenUnit(0);
  }

  void Place(const Tile& tile) {
    if constexpr (kFixed) {
      PlaceFixed(tile);
    } else {
      PlaceBalanced(tile);
    }
  }

  // Closes the last units and returns how many of each array were written.
  kernels::PlanView Finish(MetadataBuffers& buffers) {
    NoteUnit();
    for (int32_t u = unit_ + 1; u <= units_; ++u) work_indptr_[u] = items_;
    kernels::PlanView view;
    view.work_indptr = buffers.work_indptr().first(static_cast<size_t>(units_) + 1);
    view.work_info = buffers.work_info().first(static_cast<size_t>(items_));
    view.reduce_indptr = buffers.reduce_indptr().first(static_cast<size_t>(reduce_tiles_) + 1);
    view.reduce_final_map = buffers.reduce_final_map().first(static_cast<size_t>(reduce_tiles_));
    view.reduce_partial_map = buffers.reduce_partial_map().first(static_cast<size_t>(partials_));
    view.partial_rows = partial_rows_;
    return view;
  }

  int64_t busiest_kv_rows() const { return busiest_kv_rows_; }

 private:
  void OpenUnit(int64_t carried) {
    // The last unit takes whatever is left.
    room_ = unit_ + 1 == units_ ? kUnbounded : payload_ + carried;
    room_at_open_ = room_;
    items_at_open_ = items_;
  }

  void NoteUnit() {
    const int64_t kv_rows = room_at_open_ - room_ - overhead_ * (items_ - items_at_open_);
    busiest_kv_rows_ = std::max(busiest_kv_rows_, kv_rows);
  }

  void NextUnit() {
    NoteUnit();
    work_indptr_[++unit_] = items_;
    OpenUnit(kFixed ? room_ : 0);
  }

  void Emit(const Tile& tile, int32_t kv_begin, int32_t kv_end, int32_t partial_row) {
    work_info_[items_++] = {tile.request,
                            partial_row,
                            tile.q_begin,
                            tile.q_end,
                            kv_begin,
                            kv_end,
                            tile.request_kv_rows - kv_end,
                            tile.heads};
    room_ -= kv_end - kv_begin + overhead_;
  }

  void EmitPartial(const Tile& tile, int32_t kv_begin, int32_t kv_end) {
    Emit(tile, kv_begin, kv_end, partial_rows_);
    reduce_partial_map_[partials_++] = partial_rows_;
    partial_rows_ += tile.packed_rows;
  }

  // The piece from kv_begin to the end of the tile; a reduce tile if others went before.
  void EmitLast(const Tile& tile, int32_t kv_begin) {
    if (kv_begin == 0) {
      Emit(tile, 0, tile.kv_end, kernels::kUnsplit);
      return;
    }
    EmitPartial(tile, kv_begin, tile.kv_end);
    reduce_final_map_[reduce_tiles_++] = {tile.request, tile.q_begin, tile.q_end, tile.heads};
    reduce_indptr_[reduce_tiles_] = partials_;
  }

  void PlaceBalanced(const Tile& tile) {
    int32_t begin = 0;
    while (room_ < tile.kv_end - begin + overhead_) {
      int64_t cut = begin + room_ - overhead_;
      if (cut > begin) cut -= static_cast<uint32_t>(cut) % granularity_;
      if (cut > begin) {
        if (cut >= tile.first_sees) break;  // only the causal tail is left: it stays in one piece
        EmitPartial(tile, begin, static_cast<int32_t>(cut));
        begin = static_cast<int32_t>(cut);
      }
      NextUnit();
    }
    EmitLast(tile, begin);
  }

  // A piece goes to the unit that holds the middle of its charge.
  void PlaceFixed(const Tile& tile) {
    int32_t begin = 0;
    for (int64_t pieces = PiecesOf(tile, split_rows_); pieces > 1; --pieces) {
      SkipFullUnits(split_rows_);
      EmitPartial(tile, begin, begin + split_rows_);
      begin += split_rows_;
    }
    SkipFullUnits(tile.kv_end - begin);
    EmitLast(tile, begin);
  }

  void SkipFullUnits(int32_t kv_rows) {
    while (2 * room_ < kv_rows + overhead_) NextUnit();
  }

  const int32_t units_;
  const uint32_t granularity_;
  const int64_t overhead_;
  const int32_t split_rows_;
  int32_t* const work_indptr_;
  WorkInfo* const work_info_;
  int32_t* const reduce_indptr_;
  ReduceTile* const reduce_final_map_;
  int32_t* const reduce_partial_map_;
  int64_t payload_ = 0;
  int64_t room_ = 0;
  int64_t room_at_open_ = 0;
  int64_t busiest_kv_rows_ = 0;
  int32_t items_at_open_ = 0;
  int32_t unit_ = 0;
  int32_t items_ = 0;
  int32_t partials_ = 0;
  int32_t partial_rows_ = 0;
  int32_t reduce_tiles_ = 0;
};

// Plans are told apart across all planners of the process: backends keep device copies by it.
uint64_t NextGeneration() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

template <bool kFixed>
absl::StatusOr<kernels::PlanView> BuildPlan(std::span<const PlanRequest> requests,
                                            const PlanTraits& traits, MetadataBuffers& buffers,
                                            double& imbalance) {
  const int32_t head_limit = HeadLimit(traits);
  const int32_t split_rows = SplitRows(traits);
  Tally tally;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!Valid(requests[i])) [[unlikely]]
      return Explain(requests[i], i);
    Count<kFixed>(requests[i], head_limit, traits, split_rows, 1, tally);
  }
  if (auto s = CheckFits(Needs(tally, traits), buffers.capacity()); !s.ok()) return s;

  Writer<kFixed> writer(traits, tally, buffers);
  for (size_t i = 0; i < requests.size(); ++i) {
    ForEachTile(requests[i], static_cast<int32_t>(i), head_limit, traits,
                [&](const Tile& tile) { writer.Place(tile); });
  }
  kernels::PlanView view = writer.Finish(buffers);
  view.generation = NextGeneration();
  const double mean = static_cast<double>(tally.kv_rows) / traits.units;
  imbalance = tally.kv_rows > 0 ? static_cast<double>(writer.busiest_kv_rows()) / mean : 1.0;
  return view;
}

// The heads for which a packed row of a long request costs most tiles.
int32_t DensestHeads(int32_t min_heads, int32_t max_heads, const PlanTraits& traits) {
  int32_t best = min_heads;
  int64_t best_tiles = 0;  // tiles per packed row, as a fraction
  int64_t best_rows = 1;
  for (int32_t heads = min_heads; heads <= max_heads; ++heads) {
    const TileShape shape = ShapeOf(heads, traits);
    const int64_t tiles = (heads + shape.heads - 1) / shape.heads;
    const int64_t rows = static_cast<int64_t>(shape.q_rows) * heads;
    if (tiles * best_rows > best_tiles * rows) {
      best = heads;
      best_tiles = tiles;
      best_rows = rows;
    }
  }
  return best;
}

// Counts requests whose tiles outnumber those of any batch within the limits. A request has
// chunks x (1 + (q_rows - 1) / tile q rows) tiles; the two terms of that sum over a batch are
// bounded apart, each by the cheaper of two dominating sets of requests.
template <bool kFixed>
Tally CountWorst(const PlanLimits& limits, const PlanTraits& traits) {
  const auto max_heads =
      static_cast<int32_t>(std::min<int64_t>(limits.max_heads, limits.packed_rows));
  const int32_t min_heads = std::min(limits.min_heads, max_heads);
  const auto count = [&](int32_t q_rows, int32_t heads, int64_t times, Tally& tally) {
    const PlanRequest request{q_rows, limits.kv_rows, heads, false};
    Count<kFixed>(request, HeadLimit(traits), traits, SplitRows(traits), times, tally);
  };
  const auto cheaper = [](const Tally& a, const Tally& b) { return a.tiles <= b.tiles ? a : b; };

  // The first query row of every request: all with most heads, or, when the packed rows forbid
  // that, one head range each and as many ranges as the packed rows can make.
  const int64_t busy =
      std::min<int64_t>({limits.requests, limits.q_rows, limits.packed_rows / min_heads});
  Tally wide, narrow;
  count(1, max_heads, busy, wide);
  count(1, min_heads, busy, narrow);
  count(1, max_heads, (limits.packed_rows + max_heads - 1) / max_heads, narrow);
  // The other rows: all with most heads, or all packed rows where they cost most.
  const int32_t densest = DensestHeads(min_heads, max_heads, traits);
  const int64_t dense_rows = (limits.packed_rows + densest - 1) / densest;
  Tally by_rows, by_packed_rows;
  count(limits.q_rows, max_heads, 1, by_rows);
  by_packed_rows.tiles = kUnbounded;
  if (dense_rows < limits.q_rows) {
    by_packed_rows.tiles = 0;
    count(static_cast<int32_t>(dense_rows), densest, 1, by_packed_rows);
  }

  Tally worst = cheaper(wide, narrow);
  const Tally rest = cheaper(by_rows, by_packed_rows);
  worst.tiles += rest.tiles;
  worst.pieces += rest.pieces;
  worst.split_tiles += rest.split_tiles;
  worst.partials += rest.partials;
  worst.partial_rows += rest.partial_rows;
  return worst;
}

}  // namespace

PlanCapacity Planner::Capacity(const PlanLimits& limits, const PlanTraits& traits) {
  if (limits.requests <= 0 || limits.q_rows <= 0 || limits.packed_rows <= 0) {
    return Needs(Tally(), traits);
  }
  return Needs(traits.fixed_split_rows > 0 ? CountWorst<true>(limits, traits)
                                           : CountWorst<false>(limits, traits),
               traits);
}

absl::StatusOr<kernels::PlanView> Planner::Build(std::span<const PlanRequest> requests,
                                                 const PlanTraits& traits,
                                                 MetadataBuffers& buffers) {
  if (auto s = CheckTraits(traits); !s.ok()) return s;
  return traits.fixed_split_rows > 0 ? BuildPlan<true>(requests, traits, buffers, last_imbalance_)
                                     : BuildPlan<false>(requests, traits, buffers, last_imbalance_);
}

}  // namespace mla::scheduler
