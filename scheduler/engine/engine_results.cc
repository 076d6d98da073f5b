// EngineCore: what a launch that has ended shows of its requests: repeats that differ, results that
// are not finite.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/batching/rows.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/engine/result_check.h"

namespace mla::scheduler {
namespace {

// Calls visit(entry) for the entries of its step that rows [first, end) of a request belong to.
template <typename Visit>
void ForEachEntry(const StreamRequest& request, int32_t first, int32_t end, Visit&& visit) {
  const Step& step = *request.engine.step;
  const StepEntry* const past = step.entries.data() + step.entries.size();
  for (const StepEntry* entry = EntryOf(step, first); entry != past && entry->offset < end;
       ++entry) {
    visit(*entry);
  }
}

}  // namespace

void EngineCore::NoteRows(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  const int64_t dim = request.engine.step->model->spec->geometry.kv_row_dim();
  const int64_t row_bytes = dim * static_cast<int64_t>(kernels::ElementSize(args.q_dtype));
  const int32_t begin = FirstRow(request), end = begin + request.engine.rows_launched;
  ForEachEntry(request, begin, end, [&](const StepEntry& entry) {
    const int64_t first = std::max(begin, entry.offset);
    const int64_t rows = std::min(end, entry.offset + entry.rows) - first;
    const int64_t position = entry.start + first - entry.offset;
    int64_t& known = entry.sequence->not_finite_from;
    const std::byte* const at = args.kv + (first - args.row_begin) * row_bytes;
    if (known <= position || !HoldsNotFinite(at, args.q_dtype, rows * dim)) return;
    int64_t row = 0;
    while (!HoldsNotFinite(at + row * row_bytes, args.q_dtype, dim)) ++row;
    known = std::min(known, position + row);
  });
}

void EngineCore::JudgeRow(StreamRequest* request, int64_t row, int64_t head, float lse) {
  StreamRequest::EngineFields& note = request->engine;
  const AttendArgs& args = request->attend;
  const ModelSpec& spec = *note.step->model->spec;
  const auto step_row = static_cast<int32_t>(args.row_begin + row);
  const StepEntry& entry = *EntryOf(*note.step, step_row);
  const int64_t position = entry.start + step_row - entry.offset;
  const bool expected = position >= entry.sequence->not_finite_from ||
                        QueryHoldsNotFinite(args, row, head, spec.q_dim(args.profile));
  if (!expected) {
    note.bad_row = static_cast<int32_t>(row);
    note.bad_head = static_cast<int32_t>(head);
  } else if (!std::isnan(lse)) {
    // An infinity can take part in a row so that it looks as if it had seen no key.
    MarkNotANumber(args, row, head, spec.o_dim(args.profile));
  }
}

void EngineCore::CheckResults(BatchLaunch* launch) {
  const std::vector<StreamRequest*>& requests = launch->batch.requests;
  // Rows first: a query may see what a request behind it in the launch has brought. Queries show
  // whether rows that came with them are finite; of others nothing shows it.
  const auto first_bad = [&](size_t i) {
    const BatchLaunch::LseRows& lse = launch->lse[i];
    const int64_t heads = requests[i]->attend.num_heads;
    const int64_t rows = lse.at == nullptr ? 0 : requests[i]->engine.rows_launched;
    if (lse.row_stride == heads) return FirstNotFinite(lse.at, rows * heads);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = FirstNotFinite(lse.at + row * lse.row_stride, heads);
      if (head < heads) return row * heads + head;
    }
    return rows * heads;
  };
  bool all_finite = true;
  for (size_t i = 0; i < requests.size(); ++i) {
    const StreamRequest& request = *requests[i];
    const bool computed = launch->lse[i].at != nullptr;
    const bool bad =
        computed && first_bad(i) < int64_t{request.engine.rows_launched} * request.attend.num_heads;
    all_finite &= !bad;
    if (Appends(request) && (bad || !computed)) NoteRows(request);
  }
  for (size_t i = 0; !all_finite && i < requests.size(); ++i) {
    StreamRequest* const request = requests[i];
    const BatchLaunch::LseRows& lse = launch->lse[i];
    const int64_t heads = request->attend.num_heads;
    const int64_t count = lse.at == nullptr ? 0 : int64_t{request->engine.rows_launched} * heads;
    for (int64_t at = first_bad(i); at < count && request->engine.bad_row < 0; ++at) {
      const float value = lse.at[at / heads * lse.row_stride + at % heads];
      if (std::isfinite(value)) continue;
      JudgeRow(request, request->engine.rows_done + at / heads, at % heads, value);
    }
  }
}

void EngineCore::CheckRepeats(const BatchLaunch& launch) {
  for (size_t i = 0; i < launch.differs.size(); ++i) {
    const int32_t* const differs = launch.differs[i];
    if (differs == nullptr) continue;
    StreamRequest* const request = launch.batch.requests[i];
    const int32_t* const end = differs + request->engine.rows_launched;
    const int32_t* const first = std::find_if(differs, end, [](int32_t row) { return row != 0; });
    if (first == end) continue;
    request->engine.other_row = FirstRow(*request) + static_cast<int32_t>(first - differs);
  }
}

absl::Status EngineCore::ResultOf(const StreamRequest& request) const {
  const StreamRequest::EngineFields& note = request.engine;
  if (note.other_row >= 0) {
    return RefuseField("payload", absl::StrCat("other KV bytes at row ", note.other_row),
                       "equal to the rows stored before", "kv_rows_differ",
                       absl::StatusCode::kAlreadyExists);
  }
  if (note.bad_row < 0) return absl::OkStatus();
  return RefuseField("payload",
                     absl::StrCat("finite inputs of a result that is not, at row ", note.bad_row,
                                  ", head ", note.bad_head),
                     "inputs of which fp32 can hold the result", "result_not_finite");
}

}  // namespace mla::scheduler
