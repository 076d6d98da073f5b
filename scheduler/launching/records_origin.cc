#include "scheduler/launching/records_origin.h"

#include "scheduler/tables/step_table.h"

namespace mla::scheduler {
namespace {

// Returns true if the batch is one request without lists, windows, comparisons, slices, runs and
// fragments. Its segments then have one record of each kind, in order.
bool IsPlain(const Batch& batch) {
  if (batch.requests.size() != 1 || !batch.slices.empty() || !batch.runs.empty()) return false;
  const StreamRequest& request = *batch.requests[0];
  const ModelSpec& spec = *request.engine.step->model->spec;
  return !request.engine.repeat && !IsSparse(request.attend) &&
         request.attend.q_fragments.empty() && !spec.windowed() && spec.indexer.heads == 0;
}

}  // namespace

RecordsOrigin::Rows RecordsOrigin::RowsOf(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  const bool may_expand = IsExpanded(args.profile);
  return {.step = request.engine.step,
          .first = FirstRow(request),
          .count = request.engine.rows_launched,
          .head_offset = args.head_offset,
          .num_heads = args.num_heads,
          .expanded_min_rows =
              may_expand ? request.engine.step->model->ExpandedMinRows(args.q_dtype) : 0,
          .profile = args.profile,
          .q_dtype = args.q_dtype,
          .has_kv = args.has_kv};
}

void RecordsOrigin::Note(const Batch& batch, uint64_t cache_version) {
  Forget();
  if (!IsPlain(batch)) return;
  cache_version_ = cache_version;
  key_ = batch.key;
  rows_ = RowsOf(*batch.requests[0]);
}

bool RecordsOrigin::Matches(const Batch& batch, uint64_t cache_version) const {
  return cache_version_ == cache_version && IsPlain(batch) && key_ == batch.key &&
         rows_ == RowsOf(*batch.requests[0]);
}

}  // namespace mla::scheduler
