#include "scheduler/launching/batch_launch.h"

#include <cstddef>
#include <utility>

#include "base/status_macros.h"

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

void FormRecords::Reserve(int32_t count) {
  records.reserve(static_cast<size_t>(count));
  lengths.reserve(static_cast<size_t>(count));
  fragments.Reserve(count);
  windows.reserve(static_cast<size_t>(count));
}

void FormRecords::Clear() {
  windows.clear();
  records.clear();
  lengths.clear();
  fragments.Clear();
}

void ProjectionRecords::Reserve(int32_t count) {
  records.reserve(static_cast<size_t>(count));
  fragments.Reserve(count);
}

void ProjectionRecords::Clear() {
  records.clear();
  fragments.Clear();
}

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

absl::Status BatchLaunch::Create(const Limits& limits, kernels::AttentionBackend& backend,
                                 int32_t index) {
  slot = index;
  const int32_t requests = limits.launch_requests;
  const auto count = static_cast<size_t>(requests);
  batch.requests.reserve(count);
  batch.segments.reserve(count);
  batch.slices.reserve(count);
  batch.runs.reserve(count);
  batch.run_segments.reserve(count);
  layout = kernels::LaunchLayout(backend, index);
  // Each request has up to six inputs: KV rows, entries, queries, rotations or sinks, and both
  // parts of the index lists. Outputs of each request: the output, log-sum-exps, and lists or a
  // device copy of the log-sum-exps. In addition to these, unwanted log-sum-exps and comparisons.
  layout.Reserve(6 * count, 3 * count + 2);
  tables.reserve(2 * count);   // tables of rows and of entries
  appends.reserve(2 * count);  // one for the KV rows, and one for index keys or entries
  selects.reserve(count);
  absorbed.Reserve(requests);
  expanded.Reserve(requests);
  // Fused slices need one for each slice, and other requests one for each record.
  absorbs.Reserve(2 * requests);
  projects.Reserve(2 * requests);
  queries.reserve(count);
  hiddens.reserve(count);
  lse.reserve(count);
  differs.reserve(count);
  signals.reserve(count);
  gates.reserve(count);
  MLA_ASSIGN_OR_RETURN(
      unwanted_lse,
      backend.AllocateHost(static_cast<size_t>(limits.launch_packed_rows) * sizeof(float)));
  MLA_ASSIGN_OR_RETURN(compared, backend.AllocateHost(static_cast<size_t>(limits.launch_rows) * 2 *
                                                      sizeof(int32_t)));
  return absl::OkStatus();
}

void BatchLaunch::Clear() {
  layout.Clear();
  tables.clear();
}

void BatchLaunch::ClearRecords() {
  origin.Forget();
  appends.clear();
  selects.clear();
  absorbed.Clear();
  expanded.Clear();
  absorbs.Clear();
  projects.Clear();
}

}  // namespace mla::scheduler
