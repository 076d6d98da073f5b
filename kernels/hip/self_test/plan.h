// Records and plans of the self-test's launches.
#ifndef MLA_KERNELS_HIP_SELF_TEST_PLAN_H_
#define MLA_KERNELS_HIP_SELF_TEST_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/self_test/data.h"

namespace mla::kernels::hip::self_test {

inline absl::Status Wrong(const std::string& where, double got, double want) {
  return absl::InternalError(absl::StrCat(where, ": got ", got, ", want ", want));
}

inline absl::Status Run(AttentionBackend& backend, const Launch& launch) {
  absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

// Records and plans of either form: segment 0, the empty segment, and `shorts` short segments,
// which are identical and write the same results.
struct Work {
  std::vector<SegmentRecord> segments;
  std::vector<int32_t> work_indptr{0}, reduce_indptr{0}, reduce_partial_map;
  std::vector<WorkInfo> work_info;
  std::vector<ReduceTile> reduce_final_map;
  int32_t partial_rows = 0;
  uint64_t generation = 0;
  // For the expanded form.
  int32_t units = 0;
  std::vector<Round> rounds;
  std::vector<Expansion> expansions;
  std::vector<ExpandedItem> items;
  std::vector<int32_t> unit_indptr;
  RoundView round_view;

  void Add(int32_t segment, int32_t partial, int32_t q_begin, int32_t q_end, int32_t kv_begin,
           int32_t kv_end, uint32_t heads) {
    work_info.push_back({segment, partial, q_begin, q_end, kv_begin, kv_end,
                         segments[segment].kv_rows - kv_end, heads});
  }
  void EndUnit() { work_indptr.push_back(static_cast<int32_t>(work_info.size())); }
  PlanView View() const {
    return {work_indptr,        work_info,
            reduce_indptr,      reduce_final_map,
            reduce_partial_map, partial_rows,
            generation,         round_view.rounds.empty() ? nullptr : &round_view};
  }
};

// Cuts the tile of segment 0 in two, so that partial tiles and their merge are exercised. Further
// units do the same work again and write the same results.
inline void PlanAbsorbed(const Data& d, int32_t units, Work& work) {
  const Shape& shape = d.shape;
  const uint32_t all = PackHeads(0, kHeads);
  const int32_t tile = shape.absorbed * kHeads;
  const int32_t rows = shape.lists ? 1 : shape.absorbed;
  const uint32_t heads = shape.lists ? PackHeads(0, tile) : all;
  const int32_t places = shape.lists ? d.list_ends[1] : shape.kv_rows;
  const int32_t short_places = shape.lists ? d.list_ends[5] : kShortRows;
  do {
    for (const bool second : {false, true}) {
      work.Add(0, second ? tile : 0, 0, rows, second ? shape.cut : 0, second ? places : shape.cut,
               heads);
      work.Add(1, kUnsplit, 0, 1, 0, 0, all);
      work.Add(2, kUnsplit, 0, 1, 0, short_places, all);
      work.EndUnit();
    }
  } while (static_cast<int32_t>(work.work_indptr.size()) + 1 <= units);
  work.reduce_indptr.push_back(2);
  work.reduce_partial_map = {0, tile};
  work.reduce_final_map = {{0, 0, rows, heads}};
  work.partial_rows = 2 * tile;
  work.generation = NextPlanGeneration();
}

// Cuts the tile of segment 0 into pieces, one a unit, and plans nothing else.
inline void PlanPieces(const Shape& shape, Work& work) {
  const uint32_t all = PackHeads(0, kHeads);
  const int32_t tile = shape.absorbed * kHeads;
  const int32_t piece = (shape.kv_rows + shape.pieces - 1) / shape.pieces;
  for (int32_t begin = 0; begin < shape.kv_rows; begin += piece) {
    work.Add(0, work.partial_rows, 0, shape.absorbed, begin, std::min(begin + piece, shape.kv_rows),
             all);
    work.reduce_partial_map.push_back(work.partial_rows);
    work.partial_rows += tile;
    work.EndUnit();
  }
  work.reduce_indptr.push_back(static_cast<int32_t>(work.reduce_partial_map.size()));
  work.reduce_final_map = {{0, 0, shape.absorbed, all}};
  work.generation = NextPlanGeneration();
}

// Makes work items of one head and 128 query rows, not split.
inline void AddTiles(const Shape& shape, Work& work) {
  constexpr int32_t kTile = kExpandedRows;
  for (int32_t head = 0; head < kHeads; ++head) {
    const uint32_t one = PackHeads(head, head + 1);
    for (int32_t q = 0; q < shape.expanded; q += kTile) {
      const int32_t end = std::min(shape.expanded, q + kTile);
      work.Add(0, kUnsplit, q, end, 0, shape.kv_rows - shape.expanded + end, one);
    }
    for (size_t i = 1; i < work.segments.size(); ++i) {
      work.Add(static_cast<int32_t>(i), kUnsplit, 0, 1, 0, work.segments[i].kv_rows, one);
    }
    work.EndUnit();
  }
}

// Makes an expansion for each segment: of all heads if the workspace holds them, otherwise one for
// each head. When the workspace is full, a new round begins.
inline void AddExpansions(const RoundTraits& traits, Work& work) {
  int64_t used = 0;
  work.rounds.push_back({});
  for (size_t i = 0; i < work.segments.size(); ++i) {
    const int32_t rows = work.segments[i].kv_rows;
    const int32_t padded = (rows + kExpandedRows - 1) / kExpandedRows * kExpandedRows;
    if (rows == 0) continue;
    const bool all = ExpansionBytes(traits.dims, padded, kHeads) <= traits.workspace_bytes;
    for (int32_t head = 0; head < kHeads; head += all ? kHeads : 1) {
      const int32_t heads = all ? kHeads : 1;
      const int64_t bytes = ExpansionBytes(traits.dims, padded, heads);
      if (used + bytes > traits.workspace_bytes) {
        work.rounds.push_back({static_cast<int32_t>(work.expansions.size())});
        used = 0;
      }
      Round& round = work.rounds.back();
      work.expansions.push_back({used, static_cast<int32_t>(i), 0, rows, padded, head, heads,
                                 round.pairs, round.heads, 1, 0});
      used += bytes;
      ++round.expansions;
      round.pairs += padded / kExpandedRows * heads;
      round.heads += heads;
    }
  }
}

inline ExpandedItem ItemOf(const ExpandedDims& dims, const WorkInfo& info,
                           const Expansion* expansion) {
  ExpandedItem item = {};
  item.work = info;
  item.carried_row = kUnsplit;
  if (expansion == nullptr) return item;
  item.panel_bytes = int64_t{expansion->padded_rows} * kPanelRowBytes;
  const int64_t head_bytes = dims.head_bytes(expansion->padded_rows);
  item.keys = expansion->base + (info.head_begin() - expansion->head_begin) * head_bytes;
  item.rotated = expansion->base + expansion->heads * head_bytes;
  return item;
}

// Deals whole tiles to the units in turn. Tiles that see no key go with the first round.
inline void PlanExpanded(const Shape& shape, const PlanTraits& traits, Work& work) {
  work.units = traits.units;
  AddTiles(shape, work);
  AddExpansions(traits.rounds, work);
  for (size_t r = 0; r < work.rounds.size(); ++r) {
    Round& round = work.rounds[r];
    std::vector<ExpandedItem> items;
    for (const WorkInfo& info : work.work_info) {
      if (info.kv_end == 0 && r == 0) items.push_back(ItemOf(traits.rounds.dims, info, nullptr));
      for (int32_t i = 0; i < round.expansions && info.kv_end > 0; ++i) {
        const Expansion& s = work.expansions[size_t(round.first_expansion + i)];
        const bool holds = s.segment == info.segment && s.head_begin <= info.head_begin() &&
                           info.head_begin() < s.head_begin + s.heads;
        if (holds) items.push_back(ItemOf(traits.rounds.dims, info, &s));
      }
    }
    round.first_indptr = static_cast<int32_t>(work.unit_indptr.size());
    for (int32_t unit = 0; unit <= work.units; ++unit) {
      work.unit_indptr.push_back(static_cast<int32_t>(work.items.size()));
      for (size_t i = size_t(unit); unit < work.units && i < items.size();
           i += size_t(work.units)) {
        work.items.push_back(items[i]);
      }
    }
  }
  work.round_view = {work.units, work.rounds, work.expansions, work.items, work.unit_indptr, false};
  work.generation = NextPlanGeneration();
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_PLAN_H_
