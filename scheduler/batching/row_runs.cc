// Finds runs of rows: the rows of several messages of one prompt, computed as one record in the
// expanded form.
#include <algorithm>

#include "scheduler/batching/batch.h"

namespace mla::scheduler {
namespace {

// Returns true if the segment may be part of a run: it has all rows that its request launches, and
// is not a decode.
bool MayRun(const Segment& segment) {
  return segment.stage != Stage::kDecode && segment.slices < 0 && Computes(*segment.request) &&
         segment.rows == segment.request->engine.rows_launched;
}

// Adds the run that begins with segment `head`, if it is one.
void AddRun(int32_t head, Batch& batch) {
  const auto size = static_cast<int32_t>(batch.segments.size());
  RowRun run{static_cast<int32_t>(batch.run_segments.size()), 0, 0};
  const AttendArgs& args = batch.segments[head].request->attend;
  for (int32_t index = head; index < size;) {
    const Segment& last = batch.segments[index];
    batch.run_segments.push_back(index);
    ++run.count;
    run.rows += last.rows;
    for (index = 0; index < size; ++index) {
      const Segment& next = batch.segments[index];
      const AttendArgs& other = next.request->attend;
      if (next.entry == last.entry && next.row_begin == last.row_begin + last.rows &&
          MayRun(next) && other.layer == args.layer && other.head_offset == args.head_offset &&
          other.num_heads == args.num_heads && other.want_lse == args.want_lse &&
          other.on_device == args.on_device) {
        break;
      }
    }
  }
  const Model& model = *batch.segments[head].request->engine.step->model;
  if (run.count < 2 || run.rows < model.ExpandedMinRows(args.q_dtype)) {
    batch.run_segments.resize(run.first);
    return;
  }
  for (int32_t i = 0; i < run.count; ++i) {
    Segment& segment = batch.segments[batch.run_segments[run.first + i]];
    segment.run = static_cast<int32_t>(batch.runs.size());
    const bool expands = segment.rows >= model.ExpandedMinRows(args.q_dtype);
    const LaunchUnits alone = RequestCost(*segment.request, args.num_heads)
                                  .Of(*segment.entry, segment.row_begin, segment.rows, expands);
    batch.units.absorbed -= alone.absorbed;
    batch.units.expanded -= alone.expanded;
  }
  batch.units.expanded +=
      LaunchCost::ExpandedUnits(model, run.rows, args.num_heads, batch.segments[head].cached());
  batch.runs.push_back(run);
}

}  // namespace

// An indexer looks at a key of every row that the query row sees, much as dense attention does.
RequestCost::RequestCost(const StreamRequest& request, int32_t heads)
    : model_(*request.engine.step->model),
      heads_(heads),
      appended_row_bytes_(Appends(request) ? model_.rows(0).row_stride : 0),
      computes_(Computes(request)),
      absorbed_(model_, request.attend.profile, heads,
                Selects(request.attend) ? AbsorbedCost::kAllRows : MostPlaces(request)) {}

void FindRowRuns(Batch* of) {
  Batch& batch = *of;
  if (batch.key.profile != Profile::kExpanded ||
      batch.key.attention != kernels::AttentionKind::kDense ||
      batch.rows_by_stage[1] + batch.rows_by_stage[2] == 0)
    return;
  const auto size = static_cast<int32_t>(batch.segments.size());
  for (int32_t head = 0; head < size; ++head) {
    const Segment& segment = batch.segments[head];
    if (!MayRun(segment)) continue;
    const bool has_former =
        std::any_of(batch.segments.begin(), batch.segments.end(), [&](const Segment& former) {
          return former.entry == segment.entry &&
                 former.row_begin + former.rows == segment.row_begin && MayRun(former) &&
                 former.request->attend.layer == segment.request->attend.layer &&
                 former.request->attend.head_offset == segment.request->attend.head_offset;
        });
    if (!has_former) AddRun(head, batch);
  }
}

}  // namespace mla::scheduler
