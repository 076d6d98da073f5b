#include "scheduler/planning/planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "scheduler/planning/dealt_plan.h"
#include "scheduler/planning/plan_writer.h"

namespace mla::scheduler {
namespace {

using kernels::PlanTraits;

constexpr int32_t kMaxHeads = 65535;  // WorkInfo packs head bounds in 16 bits
constexpr int32_t kMaxTileRows = 1 << 16;

template <bool kFixed>
void Count(const PlanSegment& segment, const PlanTraits& traits, int64_t times, Tally& tally) {
  const int32_t split_rows = SplitRows(traits);
  ForEachTile(segment, 0, traits, [&](const Tile& tile) {
    tally.tiles += times;
    const int64_t charge = int64_t{tile.kv_end} * tile.weight;
    tally.kv_charge += times * charge;
    tally.kv_most = std::max(tally.kv_most, charge);
    tally.kv_least = std::min(tally.kv_least, charge);
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

// Does the same for the common batch: each segment is valid and makes at most one tile, and all
// tiles are charged alike. Returns false for any other batch; the tally is then meaningless.
// kFewRows: tiles have a separate bound on query rows.
template <bool kFewRows>
bool CountOnlyTiles(std::span<const PlanSegment> segments, const PlanTraits& traits, Tally& tally) {
  const int64_t tile_rows = traits.tile_rows;
  const int64_t heads_most = std::min(HeadLimit(traits), kMaxHeads);
  [[maybe_unused]] const int64_t q_rows_most = QueryRowLimit(traits);
  int64_t tiles = static_cast<int64_t>(segments.size());
  int64_t kv_rows = 0;
  int32_t kv_most = 0;
  int32_t kv_least = std::numeric_limits<int32_t>::max();
  // Negative if some segment was outside some bound: collects the sign bits of all differences.
  int64_t negative = 0;
  for (const PlanSegment& segment : segments) {
    const int64_t heads = segment.num_heads;
    negative |= segment.q_rows | segment.kv_rows | (heads - 1) | (heads_most - heads) |
                (tile_rows - segment.q_rows * heads);
    if constexpr (kFewRows) negative |= q_rows_most - segment.q_rows;
    if (segment.q_rows == 0) [[unlikely]] {
      --tiles;
      continue;
    }
    kv_rows += segment.kv_rows;
    kv_most = std::max(kv_most, segment.kv_rows);
    kv_least = std::min(kv_least, segment.kv_rows);
  }
  tally.tiles = tiles;
  tally.kv_charge = kv_rows;
  tally.kv_most = kv_most;
  tally.kv_least = kv_least;
  return negative >= 0 && traits.min_charged_rows == 0;
}

bool CountOnlyTiles(std::span<const PlanSegment> segments, const PlanTraits& traits, Tally& tally) {
  return QueryRowLimit(traits) < traits.tile_rows ? CountOnlyTiles<true>(segments, traits, tally)
                                                  : CountOnlyTiles<false>(segments, traits, tally);
}

// Returns array lengths that are enough for a batch with this tally. There are units - 1 cuts, and
// each makes at most two partial tiles.
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
  if (traits.dealt_pieces > 0) {
    const int64_t pieces = int64_t{traits.units} * traits.dealt_pieces;
    const int64_t split = tally.tiles > 0 ? pieces : 0;  // with more tiles than that, none is split
    needs.work_items = std::max(tally.tiles, split);
    needs.reduce_tiles = split / 2;
    needs.reduce_partials = split;
    needs.partial_rows = split * traits.tile_rows;
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

// Returns the number of units that share the batch: all, or as many as PlanTraits::small gives.
int32_t SharingUnits(std::span<const PlanSegment> segments, const PlanTraits& traits,
                     const Tally& tally) {
  const kernels::SmallBatches& small = traits.small;
  if (tally.tiles > small.blocks || tally.kv_charge > int64_t{small.blocks} * small.unit_kv_rows ||
      ChargeScale(traits) != 1) {
    return traits.units;
  }
  int64_t rows = 1;  // in the largest tile
  for (const PlanSegment& segment : segments) {
    const TileShape shape = ShapeOf(std::max(1, segment.num_heads), traits);
    rows = std::max(rows, int64_t{shape.heads} * std::min(shape.q_rows, segment.q_rows));
  }
  const int64_t blocks_of_tile = (rows + small.block_rows - 1) / small.block_rows;
  const int64_t units = small.blocks / blocks_of_tile;
  const bool few = tally.tiles <= units && tally.kv_charge <= units * small.unit_kv_rows;
  return few && units < traits.units ? static_cast<int32_t>(units) : traits.units;
}

absl::Status CheckTrait(const char* name, int64_t got, int64_t least, int64_t largest) {
  if (got >= least && got <= largest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("plan traits.", name, ": got ", got, ", limit ", least, "..", largest));
}

absl::Status CheckTraits(const PlanTraits& traits) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
  MLA_RETURN_IF_ERROR(CheckTrait("units", traits.units, 1, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("tile_rows", traits.tile_rows, 1, kMaxTileRows));
  MLA_RETURN_IF_ERROR(CheckTrait("max_heads_per_tile", traits.max_heads_per_tile, 0, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("max_q_rows_per_tile", traits.max_q_rows_per_tile, 0, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("kv_granularity", traits.kv_granularity, 1, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("item_overhead_rows", traits.item_overhead_rows, 0, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("min_charged_rows", traits.min_charged_rows, 0, traits.tile_rows));
  MLA_RETURN_IF_ERROR(CheckTrait("small.blocks", traits.small.blocks, 0, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("small.block_rows", traits.small.block_rows, 1, kMaxTileRows));
  MLA_RETURN_IF_ERROR(CheckTrait("small.unit_kv_rows", traits.small.unit_kv_rows, 0, kMost));
  MLA_RETURN_IF_ERROR(CheckTrait("dealt_pieces", traits.dealt_pieces, 0, kMost / traits.units));
  return CheckTrait("fixed_split_rows", traits.fixed_split_rows, 0, kMost);
}

bool Valid(const PlanSegment& segment) {
  return (segment.q_rows | segment.kv_rows) >= 0 &&
         static_cast<uint32_t>(segment.num_heads) - 1u < static_cast<uint32_t>(kMaxHeads);
}

absl::Status Explain(const PlanSegment& segment, size_t index) {
  const auto fault = [&](const char* field, int32_t got, const char* limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan segments[", index, "].", field, ": got ", got, ", limit ", limit));
  };
  if (segment.q_rows < 0) return fault("q_rows", segment.q_rows, "at least 0");
  if (segment.kv_rows < 0) return fault("kv_rows", segment.kv_rows, "at least 0");
  return fault("num_heads", segment.num_heads, "1..65535");
}

// Checks all segments before the first is cut into tiles: a segment can have millions of tiles, and
// a batch that is refused must cost nothing.
absl::Status CheckSegments(std::span<const PlanSegment> segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!Valid(segments[i])) return Explain(segments[i], i);
  }
  return absl::OkStatus();
}

template <bool kFixed>
absl::StatusOr<kernels::PlanView> BuildPlan(std::span<const PlanSegment> segments,
                                            const PlanTraits& traits, MetadataBuffers& buffers,
                                            double& imbalance) {
  Tally tally;
  const bool only_tiles = !kFixed && CountOnlyTiles(segments, traits, tally);
  if (!only_tiles) {
    MLA_RETURN_IF_ERROR(CheckSegments(segments));
    tally = Tally();
    for (const PlanSegment& segment : segments) Count<kFixed>(segment, traits, 1, tally);
  }
  MLA_RETURN_IF_ERROR(CheckFits(Needs(tally, traits), buffers.capacity()));

  const int32_t sharing = kFixed ? traits.units : SharingUnits(segments, traits, tally);
  PlanWriter<kFixed> writer(traits, tally, sharing, buffers);
  if constexpr (!kFixed) {
    if (only_tiles) writer.PlaceOnlyTiles(segments);
  }
  for (size_t i = 0; i < segments.size() && !only_tiles; ++i) {
    ForEachTile(segments[i], static_cast<int32_t>(i), traits,
                [&](const Tile& tile) { writer.Place(tile); });
  }
  kernels::PlanView view = writer.Finish();
  view.generation = kernels::NextPlanGeneration();
  const double mean = static_cast<double>(tally.kv_charge) / traits.units;
  imbalance = tally.kv_charge > 0 ? static_cast<double>(writer.busiest_charge()) / mean : 1.0;
  return view;
}

// Charged KV rows of the busiest unit / their mean over all units.
double ImbalanceOf(const kernels::PlanView& view, const PlanTraits& traits, int64_t charge) {
  int64_t busiest = 0;
  for (size_t unit = 0; unit + 1 < view.work_indptr.size(); ++unit) {
    int64_t rows = 0;
    for (int32_t i = view.work_indptr[unit]; i < view.work_indptr[unit + 1]; ++i) {
      const kernels::WorkInfo& item = view.work_info[static_cast<size_t>(i)];
      const int32_t packed = (item.q_end - item.q_begin) * (item.head_end() - item.head_begin());
      rows += int64_t{WeightOf(packed, traits)} * (item.kv_end - item.kv_begin);
    }
    busiest = std::max(busiest, rows);
  }
  return charge > 0 ? static_cast<double>(busiest) * traits.units / static_cast<double>(charge)
                    : 1.0;
}

absl::StatusOr<kernels::PlanView> BuildDealt(std::span<const PlanSegment> segments,
                                             const PlanTraits& traits, MetadataBuffers& buffers,
                                             double& imbalance) {
  MLA_RETURN_IF_ERROR(CheckSegments(segments));
  Tally tally;
  for (const PlanSegment& segment : segments) Count<false>(segment, traits, 1, tally);
  const auto for_each_tile = [&](const auto& visit) {
    for (size_t i = 0; i < segments.size(); ++i) {
      ForEachTile(segments[i], static_cast<int32_t>(i), traits, visit);
    }
  };
  const auto cut = [&](int32_t rows, PlanCapacity& needs) {
    needs = {.units = traits.units};
    for_each_tile([&](const Tile& tile) {
      const int64_t pieces = PiecesOf(tile, rows);
      needs.work_items += pieces;
      if (pieces == 1) return;
      ++needs.reduce_tiles;
      needs.reduce_partials += pieces;
      needs.partial_rows += pieces * tile.packed_rows;
    });
  };
  PlanCapacity needs;
  TileRows batch;
  for_each_tile([&](const Tile& tile) {
    ++batch.tiles;
    batch.all += tile.kv_end;
    batch.longest = std::max<int64_t>(batch.longest, tile.kv_end);
  });
  const int32_t rows = DealtRows(batch, traits, [&](int32_t of) {
    cut(of, needs);
    return needs.work_items;
  });
  cut(rows, needs);
  MLA_RETURN_IF_ERROR(CheckFits(needs, buffers.capacity()));
  DealtWriter writer(traits.units, needs.work_items, rows, buffers);
  for_each_tile([&](const Tile& tile) { writer.Place(tile); });
  kernels::PlanView view = buffers.View(needs);
  view.generation = kernels::NextPlanGeneration();
  imbalance = ImbalanceOf(view, traits, tally.kv_charge);
  return view;
}

// Returns the number of heads with which a packed row of a long segment costs the most tiles.
int32_t DensestHeads(int32_t min_heads, int32_t max_heads, const PlanTraits& traits) {
  int32_t best = min_heads;
  int64_t best_tiles = 0;  // tiles per packed row, as the fraction best_tiles / best_rows
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

// Counts segments with at least as many tiles as any batch within the limits. A segment has chunks
// x (1 + (q_rows - 1) / tile q rows) tiles. The two terms of that product, summed over a batch, are
// bounded separately, each by the cheaper of two dominating sets of segments.
template <bool kFixed>
Tally CountWorst(const PlanLimits& limits, const PlanTraits& traits) {
  const auto max_heads =
      static_cast<int32_t>(std::min<int64_t>(limits.max_heads, limits.packed_rows));
  const int32_t min_heads = std::min(limits.min_heads, max_heads);
  const auto count = [&](int32_t q_rows, int32_t heads, int64_t times, Tally& tally) {
    const PlanSegment segment{q_rows, limits.kv_rows, heads, false};
    Count<kFixed>(segment, traits, times, tally);
  };
  const auto cheaper = [](const Tally& a, const Tally& b) { return a.tiles <= b.tiles ? a : b; };

  // The first query row of each segment. Either every segment has the most heads (wide), or every
  // one has the fewest and the packed rows are spent on ranges of the most heads in addition
  // (narrow).
  const int64_t busy =
      std::min<int64_t>({limits.segments, limits.q_rows, limits.packed_rows / min_heads});
  Tally wide, narrow;
  count(1, max_heads, busy, wide);
  count(1, min_heads, busy, narrow);
  count(1, max_heads, (limits.packed_rows + max_heads - 1) / max_heads, narrow);
  // The other rows: either all have the most heads, or all packed rows go where they cost the most
  // tiles.
  const int32_t densest = DensestHeads(min_heads, max_heads, traits);
  const int64_t dense_rows = (limits.packed_rows + densest - 1) / densest;
  Tally by_rows, by_packed_rows;
  count(limits.q_rows, max_heads, 1, by_rows);
  by_packed_rows.tiles = std::numeric_limits<int64_t>::max();
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

// Each array starts at a multiple of a cache line, so that no two arrays share one.
constexpr int64_t kAlignment = 64;

constexpr int64_t Padded(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename T>
constexpr int64_t ArrayBytes(int64_t count) {
  return Padded(count * static_cast<int64_t>(sizeof(T)));
}

absl::Status CheckCount(const char* name, int64_t got, int64_t least) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
  if (got >= least && got <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("plan capacity.", name, ": got ", got, ", limit ", least, "..", kMost));
}

absl::Status CheckCapacity(const PlanCapacity& capacity) {
  MLA_RETURN_IF_ERROR(CheckCount("units", capacity.units, 1));
  MLA_RETURN_IF_ERROR(CheckCount("work_items", capacity.work_items, 0));
  MLA_RETURN_IF_ERROR(CheckCount("reduce_tiles", capacity.reduce_tiles, 0));
  MLA_RETURN_IF_ERROR(CheckCount("reduce_partials", capacity.reduce_partials, 0));
  return CheckCount("partial_rows", capacity.partial_rows, 0);
}

template <typename T>
std::span<T> Take(std::byte*& next, int64_t count) {
  const std::span<T> taken(reinterpret_cast<T*>(next), static_cast<size_t>(count));
  next += ArrayBytes<T>(count);
  return taken;
}

}  // namespace

// ----------------------------------------------------------------------------- MetadataBuffers

int64_t PlanCapacity::bytes() const {
  return ArrayBytes<kernels::WorkInfo>(work_items) + ArrayBytes<kernels::ReduceTile>(reduce_tiles) +
         ArrayBytes<int32_t>(units + 1) + ArrayBytes<int32_t>(reduce_tiles + 1) +
         ArrayBytes<int32_t>(reduce_partials) + kAlignment;
}

absl::StatusOr<std::unique_ptr<MetadataBuffers>> MetadataBuffers::Create(
    const PlanCapacity& capacity, kernels::AttentionBackend& backend) {
  MLA_RETURN_IF_ERROR(CheckCapacity(capacity));
  MLA_ASSIGN_OR_RETURN(auto memory, backend.AllocateHost(static_cast<size_t>(capacity.bytes())));
  return Create(capacity, std::move(memory));
}

absl::StatusOr<std::unique_ptr<MetadataBuffers>> MetadataBuffers::Create(
    const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory) {
  MLA_RETURN_IF_ERROR(CheckCapacity(capacity));
  const auto got = static_cast<int64_t>(memory->bytes().size());
  if (got < capacity.bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan memory: got ", got, " bytes, limit at least ", capacity.bytes()));
  }
  return std::unique_ptr<MetadataBuffers>(new MetadataBuffers(capacity, std::move(memory)));
}

MetadataBuffers::MetadataBuffers(const PlanCapacity& capacity,
                                 std::unique_ptr<kernels::HostBuffer> memory)
    : capacity_(capacity), memory_(std::move(memory)) {
  std::byte* next = memory_->bytes().data();
  const auto past = reinterpret_cast<uintptr_t>(next) % kAlignment;
  if (past != 0) next += kAlignment - past;
  work_info_ = Take<kernels::WorkInfo>(next, capacity_.work_items);
  reduce_final_map_ = Take<kernels::ReduceTile>(next, capacity_.reduce_tiles);
  work_indptr_ = Take<int32_t>(next, capacity_.units + 1);
  reduce_indptr_ = Take<int32_t>(next, capacity_.reduce_tiles + 1);
  reduce_partial_map_ = Take<int32_t>(next, capacity_.reduce_partials);
}

kernels::PlanView MetadataBuffers::View(const PlanCapacity& filled) const {
  kernels::PlanView view;
  view.work_indptr = work_indptr_.first(static_cast<size_t>(filled.units) + 1);
  view.work_info = work_info_.first(static_cast<size_t>(filled.work_items));
  view.reduce_indptr = reduce_indptr_.first(static_cast<size_t>(filled.reduce_tiles) + 1);
  view.reduce_final_map = reduce_final_map_.first(static_cast<size_t>(filled.reduce_tiles));
  view.reduce_partial_map = reduce_partial_map_.first(static_cast<size_t>(filled.reduce_partials));
  view.partial_rows = static_cast<int32_t>(filled.partial_rows);
  return view;
}

// ------------------------------------------------------------------------------------- Planner

int32_t Planner::SplitRows(const PlanTraits& traits) { return scheduler::SplitRows(traits); }

PlanCapacity Planner::Capacity(const PlanLimits& limits, const PlanTraits& traits) {
  if (limits.segments <= 0 || limits.q_rows <= 0 || limits.packed_rows <= 0) {
    return Needs(Tally(), traits);
  }
  return Needs(traits.fixed_split_rows > 0 ? CountWorst<true>(limits, traits)
                                           : CountWorst<false>(limits, traits),
               traits);
}

absl::StatusOr<kernels::PlanView> Planner::Build(std::span<const PlanSegment> segments,
                                                 const PlanTraits& traits,
                                                 MetadataBuffers& buffers) {
  MLA_RETURN_IF_ERROR(CheckTraits(traits));
  if (traits.dealt_pieces > 0) return BuildDealt(segments, traits, buffers, last_imbalance_);
  return traits.fixed_split_rows > 0 ? BuildPlan<true>(segments, traits, buffers, last_imbalance_)
                                     : BuildPlan<false>(segments, traits, buffers, last_imbalance_);
}

}  // namespace mla::scheduler
