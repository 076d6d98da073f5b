#include "scheduler/testing/plan_checker.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace mla::scheduler::testing {
namespace {

using kernels::WorkInfo;

std::string Describe(const WorkInfo& item) {
  return absl::StrCat("item{segment ", item.segment, " q ", item.q_begin, "..", item.q_end,
                      " heads ", item.head_begin(), "..", item.head_end(), " kv ", item.kv_begin,
                      "..", item.kv_end, " partial ", item.partial_row, "}");
}

int64_t PackedRows(const WorkInfo& item) {
  return static_cast<int64_t>(item.q_end - item.q_begin) * (item.head_end() - item.head_begin());
}

auto Order(const WorkInfo& item) {
  return std::make_tuple(item.segment, item.q_begin, item.head_begin(), item.kv_begin,
                         item.partial_row);
}

bool SameTile(const WorkInfo& a, const WorkInfo& b) {
  return a.segment == b.segment && a.q_begin == b.q_begin && a.head_begin() == b.head_begin();
}

}  // namespace

std::string PlanChecker::Fault(std::span<const PlanSegment> segments,
                               const kernels::PlanTraits& traits, const kernels::PlanView& view,
                               const PlanCapacity& capacity, double imbalance) {
  segments_ = segments;
  traits_ = traits;
  partial_rows_ = view.partial_rows;
  partials_.clear();
  split_begin_.clear();
  if (std::string fault = Shape(view, capacity); !fault.empty()) return fault;
  for (const WorkInfo& item : view.work_info) {
    if (std::string fault = Item(item); !fault.empty()) return fault;
  }
  sorted_.assign(view.work_info.begin(), view.work_info.end());
  std::sort(sorted_.begin(), sorted_.end(),
            [](const WorkInfo& a, const WorkInfo& b) { return Order(a) < Order(b); });
  size_t next = 0;
  for (size_t segment = 0; segment < segments.size(); ++segment) {
    const size_t first = next;
    while (next < sorted_.size() && sorted_[next].segment == static_cast<int32_t>(segment)) ++next;
    const auto items = std::span<const WorkInfo>(sorted_).subspan(first, next - first);
    if (std::string fault = Tiles(segment, items); !fault.empty()) return fault;
  }
  if (std::string fault = Reduce(view); !fault.empty()) return fault;
  if (std::string fault = Dealt(view); !fault.empty()) return fault;
  return Balance(view, imbalance);
}

std::string PlanChecker::Shape(const kernels::PlanView& view, const PlanCapacity& capacity) const {
  if (view.work_indptr.size() != static_cast<size_t>(traits_.units) + 1) return "work_indptr size";
  if (view.work_indptr.front() != 0) return "work_indptr does not start at 0";
  if (!std::is_sorted(view.work_indptr.begin(), view.work_indptr.end())) {
    return "work_indptr descends";
  }
  if (view.work_indptr.back() != static_cast<int64_t>(view.work_info.size())) {
    return "work_indptr does not end at the items";
  }
  if (view.reduce_indptr.size() != view.reduce_final_map.size() + 1) return "reduce_indptr size";
  if (traits_.units > capacity.units ||
      static_cast<int64_t>(view.work_info.size()) > capacity.work_items ||
      static_cast<int64_t>(view.reduce_final_map.size()) > capacity.reduce_tiles ||
      static_cast<int64_t>(view.reduce_partial_map.size()) > capacity.reduce_partials ||
      view.partial_rows > capacity.partial_rows) {
    return "over capacity";
  }
  return view.generation == 0 ? "generation 0" : "";
}

std::string PlanChecker::Item(const WorkInfo& item) const {
  const auto fault = [&](const char* what) { return absl::StrCat(Describe(item), ": ", what); };
  if (item.segment < 0 || item.segment >= static_cast<int64_t>(segments_.size())) {
    return fault("no such segment");
  }
  const PlanSegment& segment = segments_[static_cast<size_t>(item.segment)];
  if (item.q_begin < 0 || item.q_begin >= item.q_end || item.q_end > segment.q_rows) {
    return fault("q range");
  }
  if (item.head_begin() >= item.head_end() || item.head_end() > segment.num_heads) {
    return fault("head range");
  }
  if (item.kv_begin < 0 || item.kv_begin > item.kv_end || item.kv_end > segment.kv_rows) {
    return fault("kv range");
  }
  if (item.kv_after != segment.kv_rows - item.kv_end) return fault("kv_after");
  if (PackedRows(item) > traits_.tile_rows) return fault("more rows than a tile holds");
  if (traits_.max_heads_per_tile > 0 &&
      item.head_end() - item.head_begin() > traits_.max_heads_per_tile) {
    return fault("more heads than a tile may hold");
  }
  if (traits_.max_q_rows_per_tile > 0 && item.q_end - item.q_begin > traits_.max_q_rows_per_tile) {
    return fault("more query rows than a tile may hold");
  }
  if (item.kv_begin % traits_.kv_granularity != 0) return fault("cut off the granularity");
  if (item.partial_row < kernels::kUnsplit) return fault("partial row");
  if (item.partial_row >= 0 && item.partial_row + PackedRows(item) > partial_rows_) {
    return fault("partial past partial_rows");
  }
  return "";
}

// The tiles of a segment form a grid of bands of query rows, each cut into head ranges.
std::string PlanChecker::Tiles(size_t segment, std::span<const WorkInfo> items) {
  const int32_t q_rows = segments_[segment].q_rows;
  const int32_t heads = segments_[segment].num_heads;
  int32_t q = 0;     // rows before this one are covered for all heads
  int32_t head = 0;  // heads before this one are covered in the open band
  int32_t band_end = 0;
  for (size_t i = 0; i < items.size();) {
    size_t end = i + 1;
    while (end < items.size() && SameTile(items[i], items[end])) ++end;
    const WorkInfo& tile = items[i];
    if (tile.q_begin != q || tile.head_begin() != head) {
      return absl::StrCat(Describe(tile), ": expected q ", q, " head ", head);
    }
    if (head == 0) band_end = tile.q_end;
    if (tile.q_end != band_end) return absl::StrCat(Describe(tile), ": uneven band of query rows");
    if (std::string fault = Tile(items.subspan(i, end - i)); !fault.empty()) return fault;
    head = tile.head_end();
    if (head == heads) {
      q = band_end;
      head = 0;
    }
    i = end;
  }
  if (q != q_rows || head != 0) {
    return absl::StrCat("segment ", segment, ": covered up to q ", q, " head ", head);
  }
  return "";
}

std::string PlanChecker::Tile(std::span<const WorkInfo> pieces) {
  const PlanSegment& segment = segments_[static_cast<size_t>(pieces[0].segment)];
  const int64_t hidden = segment.causal ? int64_t{segment.q_rows} - segment.kv_rows : 0;
  const auto sees = [&](int64_t q_row) {
    return segment.causal ? std::max<int64_t>(0, q_row + 1 - hidden) : int64_t{segment.kv_rows};
  };
  const int64_t first_sees = sees(pieces[0].q_begin);
  const int64_t last_sees = sees(pieces[0].q_end - 1);
  int64_t kv = 0;
  for (const WorkInfo& piece : pieces) {
    const auto fault = [&](const char* what) { return absl::StrCat(Describe(piece), ": ", what); };
    if (piece.q_end != pieces[0].q_end || piece.heads != pieces[0].heads) {
      return fault("pieces of one tile differ in shape");
    }
    if (piece.kv_begin != kv) return fault("gap or overlap in kv");
    if (kv > 0 && kv >= first_sees) return fault("wholly masked for its first row");
    if (piece.kv_begin == piece.kv_end && last_sees > 0) return fault("empty piece");
    if (traits_.fixed_split_rows > 0 && kv % traits_.fixed_split_rows != 0 &&
        traits_.fixed_split_rows % traits_.kv_granularity == 0) {
      return fault("cut off the fixed split");
    }
    if ((piece.partial_row == kernels::kUnsplit) != (pieces.size() == 1)) {
      return fault("partial row of an unsplit tile, or none of a split one");
    }
    kv = piece.kv_end;
  }
  if (kv != last_sees) {
    return absl::StrCat(Describe(pieces.back()), ": tile ends at ", kv, ", sees ", last_sees);
  }
  if (pieces.size() > 1) {
    split_begin_.push_back(partials_.size());
    partials_.insert(partials_.end(), pieces.begin(), pieces.end());
  }
  return "";
}

std::string PlanChecker::Reduce(const kernels::PlanView& view) {
  split_begin_.push_back(partials_.size());
  const size_t tiles = split_begin_.size() - 1;
  if (view.reduce_final_map.size() != tiles) return "reduce tiles are not the split tiles";
  if (view.reduce_partial_map.size() != partials_.size()) return "reduce partials are not all";
  if (view.reduce_indptr.front() != 0) return "reduce_indptr does not start at 0";
  // Both lists are ordered by (segment, q, head).
  for (size_t t = 0; t < tiles; ++t) {
    const kernels::ReduceTile& final = view.reduce_final_map[t];
    const WorkInfo& first = partials_[split_begin_[t]];
    if (final.segment != first.segment || final.q_begin != first.q_begin ||
        final.q_end != first.q_end || final.heads != first.heads) {
      return absl::StrCat("reduce tile ", t, " is not ", Describe(first));
    }
    if (view.reduce_indptr[t + 1] != static_cast<int64_t>(split_begin_[t + 1])) {
      return absl::StrCat("reduce_indptr[", t + 1, "]");
    }
  }
  for (size_t i = 0; i < partials_.size(); ++i) {
    if (view.reduce_partial_map[i] != partials_[i].partial_row) {
      return absl::StrCat("reduce_partial_map[", i, "] is not ", Describe(partials_[i]));
    }
  }
  std::sort(partials_.begin(), partials_.end(),
            [](const WorkInfo& a, const WorkInfo& b) { return a.partial_row < b.partial_row; });
  for (size_t i = 1; i < partials_.size(); ++i) {
    if (partials_[i - 1].partial_row + PackedRows(partials_[i - 1]) > partials_[i].partial_row) {
      return absl::StrCat(Describe(partials_[i]), ": partial rows overlap");
    }
  }
  return "";
}

std::string PlanChecker::Dealt(const kernels::PlanView& view) const {
  if (traits_.dealt_pieces == 0) return "";
  for (size_t unit = 0; unit + 1 < view.work_indptr.size(); ++unit) {
    for (int32_t i = view.work_indptr[unit] + 1; i < view.work_indptr[unit + 1]; ++i) {
      const WorkInfo& before = view.work_info[static_cast<size_t>(i) - 1];
      const WorkInfo& item = view.work_info[static_cast<size_t>(i)];
      if (SameTile(before, item)) return absl::StrCat(Describe(item), ": a unit has two pieces");
      if (Order(item) < Order(before)) return absl::StrCat(Describe(item), ": out of order");
    }
  }
  int32_t row = 0;  // partial rows are assigned in the order of the pieces
  for (const int32_t partial : view.reduce_partial_map) {
    if (partial < row) return absl::StrCat("partial row ", partial, ": out of order");
    row = partial;
  }
  return "";
}

std::string PlanChecker::Balance(const kernels::PlanView& view, double imbalance) const {
  int64_t total = 0;
  int64_t busiest = 0;
  for (size_t unit = 0; unit + 1 < view.work_indptr.size(); ++unit) {
    int64_t rows = 0;
    for (int32_t i = view.work_indptr[unit]; i < view.work_indptr[unit + 1]; ++i) {
      const WorkInfo& item = view.work_info[static_cast<size_t>(i)];
      const int64_t weight = traits_.min_charged_rows > 0
                                 ? std::max<int64_t>(PackedRows(item), traits_.min_charged_rows)
                                 : 1;
      rows += weight * (item.kv_end - item.kv_begin);
    }
    total += rows;
    busiest = std::max(busiest, rows);
  }
  const double want =
      total > 0 ? static_cast<double>(busiest) * traits_.units / static_cast<double>(total) : 1.0;
  if (std::abs(imbalance - want) > 1e-9 * want) {
    return absl::StrCat("imbalance: got ", imbalance, ", items say ", want);
  }
  return "";
}

}  // namespace mla::scheduler::testing
