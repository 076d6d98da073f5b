#include "scheduler/batching/batch.h"

#include <algorithm>
#include <iterator>

namespace mla::scheduler {

void Batch::Clear() {
  requests.clear();
  segments.clear();
  slices.clear();
  runs.clear();
  run_segments.clear();
  moves.clear();
  page_writes.clear();
  page_reads.clear();
  row_products.clear();
  computes = gated = false;
  rows_by_stage[0] = rows_by_stage[1] = rows_by_stage[2] = 0;
  packed_rows = 0;
  gather_bytes = 0;
  piece_rows = 0;
  units = LaunchUnits();
  key = BatchKey();
  slice_waits_expired = 0;
  slice_waits_skipped = 0;
}

void Batch::OrderByStage() {
  const auto used = [](int32_t rows) { return rows > 0; };
  if (std::count_if(std::begin(rows_by_stage), std::end(rows_by_stage), used) <= 1) return;
  by_stage_.clear();
  for (const Stage stage : {Stage::kDecode, Stage::kExtend, Stage::kPrefill}) {
    for (const Segment& segment : segments) {
      if (segment.stage == stage) by_stage_.push_back(segment);
    }
  }
  segments.swap(by_stage_);
}

}  // namespace mla::scheduler
