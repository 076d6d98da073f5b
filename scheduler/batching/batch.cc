#include "scheduler/batching/batch.h"

#include <algorithm>
#include <iterator>

namespace mla::scheduler {
namespace {

// Returns true if the segment may be part of a run: it has all rows that its request launches, and
// is not a decode.
bool MayRun(const Segment& segment) {
  return segment.stage != Stage::kDecode && segment.slices < 0 && Computes(*segment.request) &&
         segment.rows == segment.request->engine.rows_launched;
}

}  // namespace

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

// Adds the run that begins with segment `head`, if it is one.
void Batch::AddRun(int32_t head) {
  const auto size = static_cast<int32_t>(segments.size());
  RowRun run{static_cast<int32_t>(run_segments.size()), 0, 0};
  const AttendArgs& args = segments[head].request->attend;
  for (int32_t index = head; index < size;) {
    const Segment& last = segments[index];
    run_segments.push_back(index);
    ++run.count;
    run.rows += last.rows;
    for (index = 0; index < size; ++index) {
      const Segment& next = segments[index];
      const AttendArgs& other = next.request->attend;
      if (next.entry == last.entry && next.row_begin == last.row_begin + last.rows &&
          MayRun(next) && other.layer == args.layer && other.head_offset == args.head_offset &&
          other.num_heads == args.num_heads && other.want_lse == args.want_lse &&
          other.on_device == args.on_device) {
        break;
      }
    }
  }
  const Model& model = *segments[head].request->engine.step->model;
  if (run.count < 2 || run.rows < model.ExpandedMinRows(args.q_dtype)) {
    run_segments.resize(run.first);
    return;
  }
  for (int32_t i = 0; i < run.count; ++i) {
    Segment& segment = segments[run_segments[run.first + i]];
    segment.run = static_cast<int32_t>(runs.size());
    const bool expands = segment.rows >= model.ExpandedMinRows(args.q_dtype);
    const LaunchUnits alone = RequestCost(*segment.request, args.num_heads)
                                  .Of(*segment.entry, segment.row_begin, segment.rows, expands);
    units.absorbed -= alone.absorbed;
    units.expanded -= alone.expanded;
  }
  units.expanded +=
      LaunchCost::ExpandedUnits(model, run.rows, args.num_heads, segments[head].cached());
  runs.push_back(run);
}

void Batch::FindRuns() {
  if (key.profile != Profile::kExpanded || key.attention != kernels::AttentionKind::kDense ||
      rows_by_stage[1] + rows_by_stage[2] == 0)
    return;
  const auto size = static_cast<int32_t>(segments.size());
  for (int32_t head = 0; head < size; ++head) {
    const Segment& segment = segments[head];
    if (!MayRun(segment)) continue;
    const bool has_former =
        std::any_of(segments.begin(), segments.end(), [&](const Segment& former) {
          return former.entry == segment.entry &&
                 former.row_begin + former.rows == segment.row_begin && MayRun(former) &&
                 former.request->attend.layer == segment.request->attend.layer &&
                 former.request->attend.head_offset == segment.request->attend.head_offset;
        });
    if (!has_former) AddRun(head);
  }
}

}  // namespace mla::scheduler
