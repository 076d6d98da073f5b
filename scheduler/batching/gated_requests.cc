#include "scheduler/batching/gated_requests.h"

#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

bool CanBeGated(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  const Step& step = *request.engine.step;
  // Log-sum-exps would be copied to the client's memory even if the launch came too late.
  if (args.want_lse && args.on_device) return false;
  // Outputs of fused slices would be copied, too, and their queries are copied before the launch
  // waits. EXPANDED has no such copies, because its projections read and write the slices where
  // they are.
  if (step.participants > 1 && request.engine.group != nullptr && !IsExpanded(args.profile)) {
    return false;
  }
  // The expanded form takes longer than going ahead would save.
  return !IsExpanded(args.profile) || args.row_count < step.model->ExpandedMinRows(args.q_dtype);
}

bool AreSlices(const StreamRequest& a, const StreamRequest& b) {
  return a.engine.step == b.engine.step && a.engine.step->participants > 1 &&
         a.attend.layer == b.attend.layer && FirstRow(a) == FirstRow(b) && EndRow(a) == EndRow(b) &&
         a.stream != b.stream;
}

}  // namespace mla::scheduler
