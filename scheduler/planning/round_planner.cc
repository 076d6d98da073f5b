#include "scheduler/planning/round_planner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

using kernels::ExpandedItem;
using kernels::Expansion;
using kernels::ExpansionBytes;
using kernels::kExpandedRows;
using kernels::kPanelRowBytes;
using kernels::kRotatedPanels;
using kernels::kUnsplit;
using kernels::PlanView;
using kernels::Round;
using kernels::RoundView;
using kernels::WorkInfo;

constexpr int64_t kRotatedBytes = int64_t{kPanelRowBytes} * kRotatedPanels;

// Costs of an item: its start and end take as long as about two and a half tiles of KV rows.
constexpr int64_t kCostOfTile = 2;
constexpr int64_t kCostOfItem = 5;
// A cut pays if it saves more than merging partial tiles costs (about eight tiles) and more than
// one kIdlePart-th of the whole. Each piece has its own start and end.
constexpr int64_t kCostOfMerge = 8 * kCostOfTile;
constexpr int64_t kIdlePart = 8;

int64_t TilesOf(int64_t rows) { return (rows + kExpandedRows - 1) / kExpandedRows; }
int64_t Padded(int64_t rows) { return TilesOf(rows) * kExpandedRows; }

absl::Status Misfit(const char* what, int64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat("expanded form: more ", what, " than the limit ", limit));
}

int32_t Seen(const PlanSegment& segment, int32_t q_end) {
  if (!segment.causal) return segment.kv_rows;
  return std::clamp(segment.kv_rows - segment.q_rows + q_end, 0, segment.kv_rows);
}

int64_t MostRounds(const RoundCapacity& capacity) {
  return std::min<int64_t>(capacity.expansions + 1, kernels::kMostRounds);
}

}  // namespace

int64_t RoundCapacity::bytes() const {
  if (units == 0) return 0;
  return MostRounds(*this) * (static_cast<int64_t>(sizeof(Round)) +
                              (units + 1) * static_cast<int64_t>(sizeof(int32_t))) +
         items * static_cast<int64_t>(sizeof(ExpandedItem)) +
         expansions * static_cast<int64_t>(sizeof(Expansion));
}

RoundBuffers::RoundBuffers(const RoundCapacity& capacity) {
  if (capacity.units == 0) return;
  const auto rounds = static_cast<size_t>(MostRounds(capacity));
  rounds_.reserve(rounds);
  expansions_.reserve(static_cast<size_t>(capacity.expansions));
  items_.reserve(static_cast<size_t>(capacity.items));
  unit_indptr_.reserve(rounds * (static_cast<size_t>(capacity.units) + 1));
}

RoundPlanner::RoundPlanner(const RoundCapacity& capacity) : capacity_(capacity) {
  if (capacity.units == 0) return;
  const auto items = static_cast<size_t>(capacity.items);
  const auto expansions = static_cast<size_t>(capacity.expansions);
  round_of_expansion_.reserve(expansions);
  section_of_expansion_.reserve(expansions);
  placed_.reserve(static_cast<size_t>(capacity.segments));
  tiles_.reserve(items);
  entries_.reserve(items);
  unit_of_entry_.reserve(items);
  loads_.reserve(static_cast<size_t>(capacity.units));
}

absl::StatusOr<RoundView> RoundPlanner::Build(const PlanView& plan,
                                              std::span<const PlanSegment> segments,
                                              const kernels::PlanTraits& traits,
                                              RoundBuffers& out) {
  if (traits.units < 1 || traits.units > capacity_.units) {
    return absl::InvalidArgumentError(
        absl::StrCat("rounds.units: got ", traits.units, ", limit 1..", capacity_.units));
  }
  const int64_t least_bytes = kernels::LeastRoundWorkspace(traits.rounds.dims);
  if (traits.rounds.workspace_bytes < least_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rounds.workspace_bytes: got ", traits.rounds.workspace_bytes, ", want >= ", least_bytes));
  }
  traits_ = traits.rounds;
  units_ = traits.units;
  out_ = &out;
  MLA_RETURN_IF_ERROR(PlaceExpansions(segments));
  tiles_.clear();
  MLA_RETURN_IF_ERROR(CollectWhole(plan, segments));
  MLA_RETURN_IF_ERROR(Deal());
  RoundView view;
  view.units = units_;
  const int64_t least = static_cast<int64_t>(out.rounds_.size()) * kCostOfMerge;
  view.merges = !plan.reduce_final_map.empty() && idle_ > std::max(least, busy_ / kIdlePart) &&
                KeepsPieces(plan);
  if (view.merges) {
    tiles_.clear();
    MLA_RETURN_IF_ERROR(CollectPieces(plan));
    MLA_RETURN_IF_ERROR(Deal());
  }
  view.rounds = out.rounds_;
  view.expansions = out.expansions_;
  view.items = out.items_;
  view.unit_indptr = out.unit_indptr_;
  return view;
}

// --- Expansions.

absl::Status RoundPlanner::PlaceExpansions(std::span<const PlanSegment> segments) {
  out_->rounds_.clear();
  out_->expansions_.clear();
  round_of_expansion_.clear();
  section_of_expansion_.clear();
  placed_.clear();
  out_->rounds_.push_back({});
  if (segments.size() > placed_.capacity()) return Misfit("segments", capacity_.segments);
  int64_t used = 0;  // bytes of the open round
  for (size_t i = 0; i < segments.size(); ++i) {
    placed_.push_back({static_cast<int32_t>(out_->expansions_.size()), 0, 0});
    const PlanSegment& r = segments[i];
    if (r.q_rows == 0 || r.kv_rows == 0 || r.num_heads == 0) continue;
    MLA_RETURN_IF_ERROR(PlaceSegment(static_cast<int32_t>(i), r, used));
  }
  return absl::OkStatus();
}

absl::Status RoundPlanner::PlaceSegment(int32_t index, const PlanSegment& segment, int64_t& used) {
  Placed& placed = placed_.back();
  Expansion expansion = {};
  expansion.segment = index;
  const int64_t padded = Padded(segment.kv_rows);
  const int64_t room = traits_.workspace_bytes - padded * kRotatedBytes;
  const int64_t heads_fit = room / traits_.dims.head_bytes(padded);
  if (room > 0 && heads_fit > 0) {
    // Spreads the heads evenly over the fewest rounds that hold them, so that no round is nearly
    // empty.
    const int64_t parts = (segment.num_heads + heads_fit - 1) / heads_fit;
    const int64_t heads = (segment.num_heads + parts - 1) / parts;
    placed.heads_per_expansion = static_cast<int32_t>(heads);
    expansion.rows = segment.kv_rows;
    for (int32_t head = 0; head < segment.num_heads; head += placed.heads_per_expansion) {
      expansion.head_begin = head;
      expansion.heads = std::min(placed.heads_per_expansion, segment.num_heads - head);
      const bool fits =
          used + ExpansionBytes(traits_.dims, padded, expansion.heads) <= traits_.workspace_bytes;
      MLA_RETURN_IF_ERROR(AddExpansion(expansion, !fits, used));
    }
    return absl::OkStatus();
  }
  if (segment.q_rows > traits_.carry_rows) return Misfit("query rows", traits_.carry_rows);
  placed.heads_per_expansion = 1;
  const int64_t tile_bytes = (PanelsBytes() + kRotatedBytes) * kExpandedRows;
  placed.rows_per_chunk =
      static_cast<int32_t>((traits_.workspace_bytes - traits_.dims.rest_bytes()) / tile_bytes) *
      kExpandedRows;
  expansion.heads = 1;
  for (int32_t head = 0; head < segment.num_heads; ++head) {
    expansion.head_begin = head;
    for (int32_t row = 0; row < segment.kv_rows; row += placed.rows_per_chunk) {
      expansion.kv_begin = row;
      expansion.rows = std::min(placed.rows_per_chunk, segment.kv_rows - row);
      // Rows that carry results hold one segment and head only, so rounds are not shared.
      MLA_RETURN_IF_ERROR(AddExpansion(expansion, true, used));
    }
  }
  used = traits_.workspace_bytes;
  return absl::OkStatus();
}

absl::Status RoundPlanner::AddExpansion(const Expansion& expansion, bool new_round, int64_t& used) {
  if (out_->expansions_.size() == out_->expansions_.capacity())
    return Misfit("expansions", capacity_.expansions);
  if (new_round && out_->rounds_.back().expansions > 0) {
    const size_t most =
        std::min(out_->rounds_.capacity(), static_cast<size_t>(std::max(traits_.most, 1)));
    if (out_->rounds_.size() >= most) return Misfit("rounds", static_cast<int64_t>(most));
    out_->rounds_.push_back({static_cast<int32_t>(out_->expansions_.size()), 0, 0, 0, 0});
    used = 0;
  }
  Round& round = out_->rounds_.back();
  Expansion placed = expansion;
  placed.padded_rows = static_cast<int32_t>(Padded(expansion.rows));
  placed.base = used;
  placed.first_pair = round.pairs;
  placed.first_head = round.heads;
  round.heads += placed.heads;
  used += ExpansionBytes(traits_.dims, placed.padded_rows, placed.heads);
  round.pairs += placed.padded_rows / kExpandedRows * placed.heads;
  // Sections are numbered through a round. Heads that fit into the cache together have the same
  // number.
  const int64_t head_bytes = int64_t{placed.padded_rows} * PanelsBytes();
  const int64_t sections =
      (placed.heads * head_bytes + traits_.cache_bytes - 1) / traits_.cache_bytes;
  const int32_t section =
      round.expansions == 0 ? 0 : section_of_expansion_.back() + out_->expansions_.back().sections;
  placed.sections = static_cast<int32_t>(std::min<int64_t>(sections, placed.heads));
  out_->expansions_.push_back(placed);
  section_of_expansion_.push_back(section);
  round_of_expansion_.push_back(static_cast<int32_t>(out_->rounds_.size()) - 1);
  ++round.expansions;
  return absl::OkStatus();
}

// --- Tiles.

absl::Status RoundPlanner::AddTile(const Tile& tile) {
  if (tiles_.size() == tiles_.capacity()) return Misfit("tiles", capacity_.items);
  tiles_.push_back(tile);
  return absl::OkStatus();
}

absl::Status RoundPlanner::AddTiles(const PlanSegment& record, int32_t segment, int32_t q_begin,
                                    int32_t q_end, int32_t head_begin, int32_t head_end) {
  for (int32_t q = q_begin; q < q_end; q += kExpandedRows) {
    const int32_t end = std::min(q_end, q + kExpandedRows);
    for (int32_t head = head_begin; head < head_end; ++head) {
      MLA_RETURN_IF_ERROR(AddTile({segment, q, end, head, 0, Seen(record, end), kUnsplit}));
    }
  }
  return absl::OkStatus();
}

// The tiles of the plan are its unsplit items and the tiles into which partial ones are merged.
absl::Status RoundPlanner::CollectWhole(const PlanView& plan,
                                        std::span<const PlanSegment> segments) {
  for (const WorkInfo& w : plan.work_info) {
    if (w.partial_row != kUnsplit) continue;
    MLA_RETURN_IF_ERROR(AddTiles(segments[static_cast<size_t>(w.segment)], w.segment, w.q_begin,
                                 w.q_end, w.head_begin(), w.head_end()));
  }
  for (const kernels::ReduceTile& t : plan.reduce_final_map) {
    MLA_RETURN_IF_ERROR(AddTiles(segments[static_cast<size_t>(t.segment)], t.segment, t.q_begin,
                                 t.q_end, t.head_begin(), t.head_end()));
  }
  return absl::OkStatus();
}

bool RoundPlanner::KeepsPieces(const PlanView& plan) const {
  return std::all_of(plan.work_info.begin(), plan.work_info.end(), [](const WorkInfo& w) {
    return w.head_end() - w.head_begin() == 1 && w.q_end - w.q_begin <= kExpandedRows &&
           w.kv_begin % kExpandedRows == 0;
  });
}

absl::Status RoundPlanner::CollectPieces(const PlanView& plan) {
  for (const WorkInfo& w : plan.work_info) {
    MLA_RETURN_IF_ERROR(AddTile(
        {w.segment, w.q_begin, w.q_end, w.head_begin(), w.kv_begin, w.kv_end, w.partial_row}));
  }
  return absl::OkStatus();
}

// --- Items.

// The order of entries is round, section, longest first, then head, with 16 bits for each.
absl::Status RoundPlanner::AddEntry(int32_t tile_index, int32_t expansion) {
  if (entries_.size() == entries_.capacity()) return Misfit("items", capacity_.items);
  const Tile& tile = tiles_[static_cast<size_t>(tile_index)];
  uint64_t round = 0, section = 0, short_of = 0xffff;
  if (expansion >= 0) {
    const Expansion& s = out_->expansions_[static_cast<size_t>(expansion)];
    round = static_cast<uint64_t>(round_of_expansion_[static_cast<size_t>(expansion)]);
    section = std::min<uint64_t>(
        0xffff, section_of_expansion_[static_cast<size_t>(expansion)] +
                    static_cast<uint64_t>((tile.head - s.head_begin) * s.sections / s.heads));
    const int64_t begin = std::max(tile.kv_begin, s.kv_begin);
    const int64_t end = std::min(tile.kv_end, s.kv_begin + s.rows);
    short_of -= static_cast<uint64_t>(std::clamp<int64_t>(TilesOf(end - begin), 0, 0xffff));
  }
  entries_.push_back({round << 48 | section << 32 | short_of << 16 |
                          static_cast<uint64_t>(static_cast<uint16_t>(tile.head)),
                      tile_index, expansion});
  return absl::OkStatus();
}

absl::Status RoundPlanner::AddEntries(int32_t tile_index) {
  const Tile& tile = tiles_[static_cast<size_t>(tile_index)];
  const Placed& placed = placed_[static_cast<size_t>(tile.segment)];
  if (placed.heads_per_expansion == 0) return AddEntry(tile_index, -1);  // no KV rows at all
  if (placed.rows_per_chunk == 0) {
    return AddEntry(tile_index, placed.first_expansion + tile.head / placed.heads_per_expansion);
  }
  int32_t expansion = placed.first_expansion;
  while (out_->expansions_[static_cast<size_t>(expansion)].head_begin < tile.head) ++expansion;
  expansion += tile.kv_begin / placed.rows_per_chunk;
  const int32_t end = std::max(tile.kv_end, tile.kv_begin + 1);  // even an empty tile has an item
  for (int32_t row = tile.kv_begin / placed.rows_per_chunk * placed.rows_per_chunk; row < end;
       row += placed.rows_per_chunk, ++expansion) {
    MLA_RETURN_IF_ERROR(AddEntry(tile_index, expansion));
  }
  return absl::OkStatus();
}

ExpandedItem RoundPlanner::MakeItem(const Entry& entry) const {
  const Tile& tile = tiles_[static_cast<size_t>(entry.tile)];
  ExpandedItem item = {};
  item.work = {tile.segment,
               tile.partial_row,
               tile.q_begin,
               tile.q_end,
               tile.kv_begin,
               tile.kv_end,
               0,
               kernels::PackHeads(tile.head, tile.head + 1)};
  item.carried_row = kUnsplit;
  if (entry.expansion < 0) return item;
  const Expansion& s = out_->expansions_[static_cast<size_t>(entry.expansion)];
  const int32_t expansion_end = s.kv_begin + s.rows;
  const int32_t carry =
      tile.partial_row >= 0 ? tile.partial_row : traits_.first_carry_row + tile.q_begin;
  if (s.kv_begin > tile.kv_begin) {
    item.work.kv_begin = s.kv_begin;
    item.carried_row = carry;
  }
  if (expansion_end < tile.kv_end) {
    item.work.kv_end = expansion_end;
    item.work.partial_row = carry;
  }
  const int64_t offset = int64_t{item.work.kv_begin - s.kv_begin} * kPanelRowBytes;
  item.panel_bytes = int64_t{s.padded_rows} * kPanelRowBytes;
  const int64_t head_bytes = traits_.dims.head_bytes(s.padded_rows);
  item.keys = s.base + (tile.head - s.head_begin) * head_bytes + offset;
  item.rotated = s.base + s.heads * head_bytes + offset;
  return item;
}

absl::Status RoundPlanner::Deal() {
  entries_.clear();
  for (size_t i = 0; i < tiles_.size(); ++i) {
    MLA_RETURN_IF_ERROR(AddEntries(static_cast<int32_t>(i)));
  }
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    return a.key != b.key ? a.key < b.key : a.tile < b.tile;
  });
  unit_of_entry_.resize(entries_.size());
  out_->items_.resize(entries_.size());
  out_->unit_indptr_.clear();
  idle_ = busy_ = 0;
  const auto later = [](const Load& a, const Load& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.unit > b.unit;
  };
  size_t begin = 0;
  for (size_t round = 0; round < out_->rounds_.size(); ++round) {
    out_->rounds_[round].first_indptr = static_cast<int32_t>(out_->unit_indptr_.size());
    loads_.clear();
    for (int32_t unit = 0; unit < units_; ++unit) loads_.push_back({0, unit});
    out_->unit_indptr_.resize(out_->unit_indptr_.size() + units_ + 1, 0);
    int32_t* ends = out_->unit_indptr_.data() + out_->rounds_[round].first_indptr;
    int64_t total = 0, largest = 0;
    size_t end = begin;
    for (; end < entries_.size() && RoundOf(entries_[end]) == static_cast<int32_t>(round); ++end) {
      const int64_t tiles = 0xffff - static_cast<int64_t>(entries_[end].key >> 16 & 0xffff);
      const int64_t cost = tiles * kCostOfTile + kCostOfItem;
      std::pop_heap(loads_.begin(), loads_.end(), later);
      Load& least = loads_.back();
      unit_of_entry_[end] = least.unit;
      ++ends[least.unit + 1];
      least.cost += cost;
      total += cost;
      largest = std::max(largest, least.cost);
      std::push_heap(loads_.begin(), loads_.end(), later);
    }
    idle_ += largest - total / units_;
    busy_ += total / units_;
    ends[0] = static_cast<int32_t>(begin);
    for (int32_t unit = 0; unit < units_; ++unit) ends[unit + 1] += ends[unit];
    // Writes each unit's items in the order in which they were dealt. This moves ends[unit], which
    // is set back afterwards.
    for (size_t i = begin; i < end; ++i)
      out_->items_[ends[unit_of_entry_[i]]++] = MakeItem(entries_[i]);
    for (int32_t unit = units_; unit > 0; --unit) ends[unit] = ends[unit - 1];
    ends[0] = static_cast<int32_t>(begin);
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
