#include "tests/conformance/suite/plan_builder.h"

#include <algorithm>

namespace mla::conformance {

using kernels::kUnsplit;
using kernels::PackHeads;
using kernels::PlanTraits;
using kernels::PlanView;

void EvenPlanBuilder::AddTile(int32_t request, const PlanShape& shape, int32_t q_begin,
                              int32_t q_end, uint32_t heads, const PlanTraits& traits) {
  // Pieces begin at multiples of the granularity; a short cache leaves the last pieces empty.
  const int32_t pieces = std::min(traits.units, 5);
  const int32_t granules =
      (shape.kv_rows + traits.kv_granularity - 1) / std::max(1, traits.kv_granularity);
  const int32_t per_piece = (granules + pieces - 1) / pieces * traits.kv_granularity;
  kernels::WorkInfo work{};
  work.segment = request;
  work.q_begin = q_begin;
  work.q_end = q_end;
  work.heads = heads;
  const int32_t rows = (q_end - q_begin) * (work.head_end() - work.head_begin());
  for (int32_t piece = 0; piece < pieces; ++piece) {
    work.kv_begin = std::min(shape.kv_rows, piece * per_piece);
    work.kv_end = pieces == 1 ? shape.kv_rows : std::min(shape.kv_rows, (piece + 1) * per_piece);
    work.kv_after = shape.kv_rows - work.kv_end;
    work.partial_row = pieces == 1 ? kUnsplit : partial_rows_;
    work_info_.push_back(work);
    if (pieces == 1) continue;
    reduce_partial_map_.push_back(partial_rows_);
    partial_rows_ += rows;
  }
  if (pieces == 1) return;
  reduce_final_map_.push_back({request, q_begin, q_end, heads});
  reduce_indptr_.push_back(static_cast<int32_t>(reduce_partial_map_.size()));
}

absl::StatusOr<PlanView> EvenPlanBuilder::Build(std::span<const PlanShape> shapes,
                                                const PlanTraits& traits) {
  work_info_.clear();
  reduce_final_map_.clear();
  reduce_partial_map_.clear();
  reduce_indptr_.assign(1, 0);
  partial_rows_ = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const PlanShape& shape = shapes[i];
    int32_t heads = std::min(shape.num_heads, traits.tile_rows);
    if (traits.max_heads_per_tile > 0) heads = std::min(heads, traits.max_heads_per_tile);
    int32_t q_step = std::max(1, traits.tile_rows / heads);
    if (traits.max_q_rows_per_tile > 0) q_step = std::min(q_step, traits.max_q_rows_per_tile);
    for (int32_t q = 0; q < shape.q_rows; q += q_step) {
      for (int32_t head = 0; head < shape.num_heads; head += heads) {
        AddTile(static_cast<int32_t>(i), shape, q, std::min(shape.q_rows, q + q_step),
                PackHeads(head, std::min(shape.num_heads, head + heads)), traits);
      }
    }
  }
  // Items are dealt out in contiguous ranges of nearly equal count.
  const int64_t items = static_cast<int64_t>(work_info_.size());
  work_indptr_.clear();
  for (int64_t unit = 0; unit <= traits.units; ++unit) {
    work_indptr_.push_back(static_cast<int32_t>(items * unit / traits.units));
  }
  PlanView view;
  view.work_indptr = work_indptr_;
  view.work_info = work_info_;
  view.reduce_indptr = reduce_indptr_;
  view.reduce_final_map = reduce_final_map_;
  view.reduce_partial_map = reduce_partial_map_;
  view.partial_rows = partial_rows_;
  view.generation = kernels::NextPlanGeneration();
  return view;
}

}  // namespace mla::conformance
