#include "scheduler/batch.h"

#include <algorithm>

namespace mla::scheduler {
namespace {

LayerProgress& Progress(const StreamRequest& request) {
  return request.engine.step->layers[request.attend.layer];
}

bool Computes(const StreamRequest& request) {
  return request.attend.profile != Profile::kAppendOnly;
}

BatchKey KeyOf(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  return BatchKey{request.engine.step->model->spec->geometry, args.profile, args.q_dtype,
                  args.o_dtype};
}

// The entry of a step that holds one of its rows.
const StepEntry* EntryOf(const Step& step, int32_t row) {
  const auto after =
      std::upper_bound(step.entries.begin(), step.entries.end(), row,
                       [](int32_t r, const StepEntry& entry) { return r < entry.offset; });
  return &*(after - 1);
}

}  // namespace

void PendingList::PushBack(StreamRequest* request) {
  request->engine.prev = tail_;
  request->engine.next = nullptr;
  (tail_ == nullptr ? head_ : tail_->engine.next) = request;
  tail_ = request;
  ++size_;
}

void PendingList::PushFront(StreamRequest* request) {
  request->engine.prev = nullptr;
  request->engine.next = head_;
  (head_ == nullptr ? tail_ : head_->engine.prev) = request;
  head_ = request;
  ++size_;
}

void PendingList::Remove(StreamRequest* request) {
  StreamRequest* prev = request->engine.prev;
  StreamRequest* next = request->engine.next;
  (prev == nullptr ? head_ : prev->engine.next) = next;
  (next == nullptr ? tail_ : next->engine.prev) = prev;
  request->engine.prev = request->engine.next = nullptr;
  --size_;
}

void Batch::Clear() {
  requests.clear();
  segments.clear();
  computes = false;
  rows_by_stage[0] = rows_by_stage[1] = rows_by_stage[2] = 0;
  packed_rows = 0;
}

void Batch::OrderByStage() {
  by_stage_.clear();
  for (const Stage stage : {Stage::kDecode, Stage::kExtend, Stage::kPrefill}) {
    for (const Segment& segment : segments) {
      if (segment.stage == stage) by_stage_.push_back(segment);
    }
  }
  segments.swap(by_stage_);
}

BatchPolicy::BatchPolicy(const Limits& limits) : limits_(limits) {}

bool BatchPolicy::Ready(const StreamRequest& request) {
  const LayerProgress& layer = Progress(request);
  if (request.engine.repeat) return request.engine.compared;
  if (request.attend.has_kv) return layer.appended == FirstRow(request);
  return layer.appended >= EndRow(request);
}

bool BatchPolicy::WaitsForRows(const StreamRequest& request, int32_t* first, int32_t* last) {
  const LayerProgress& layer = Progress(request);
  if (request.attend.has_kv || layer.accepted >= EndRow(request)) return false;
  *first = layer.accepted;
  *last = EndRow(request) - 1;
  return true;
}

Stage BatchPolicy::StageOf(const StreamRequest& request) const {
  const Step& step = *request.engine.step;
  Stage stage = Stage::kDecode;
  int32_t row = FirstRow(request);
  const int32_t end = EndRow(request);
  for (const StepEntry* entry = EntryOf(step, row); row < end; ++entry) {
    const int32_t rows = std::min(end, entry->offset + entry->rows) - row;
    const int32_t cached = entry->start + row - entry->offset;
    if (cached == 0) return Stage::kPrefill;
    if (rows > limits_.decode_rows) stage = Stage::kExtend;
    row += rows;
  }
  return stage;
}

void BatchPolicy::AddSegments(StreamRequest* request, int32_t rows, Batch& batch) {
  int32_t row = FirstRow(*request);
  const int32_t end = row + rows;
  for (const StepEntry* entry = EntryOf(*request->engine.step, row); row < end; ++entry) {
    Segment segment{request, entry, row, std::min(end, entry->offset + entry->rows) - row};
    segment.stage = segment.cached() == 0                 ? Stage::kPrefill
                    : segment.rows <= limits_.decode_rows ? Stage::kDecode
                                                          : Stage::kExtend;
    batch.rows_by_stage[static_cast<int>(segment.stage)] += segment.rows;
    batch.segments.push_back(segment);
    row += segment.rows;
  }
}

bool BatchPolicy::Take(StreamRequest* request, Stage stage, Batch& batch) {
  const int32_t heads = Computes(*request) ? request->attend.num_heads : 0;
  int32_t rows = EndRow(*request) - FirstRow(*request);
  rows = std::min(rows, limits_.launch_rows - batch.rows());
  if (heads > 0) rows = std::min(rows, (limits_.launch_packed_rows - batch.packed_rows) / heads);
  if (stage != Stage::kDecode) {
    rows = std::min(rows, limits_.prefill_rows - batch.rows_by_stage[1] - batch.rows_by_stage[2]);
  }
  // A request has at most as many records as its step has entries.
  const int64_t records = static_cast<int64_t>(request->engine.step->entries.size());
  const int64_t room = limits_.launch_requests - static_cast<int64_t>(batch.segments.size());
  rows = static_cast<int32_t>(std::min<int64_t>(rows, records <= room ? rows : room));
  if (rows <= 0) return false;
  AddSegments(request, rows, batch);
  batch.packed_rows += rows * heads;
  request->engine.batch_index = static_cast<int32_t>(batch.requests.size());
  batch.requests.push_back(request);
  request->engine.rows_launched = rows;
  if (Appends(*request)) Progress(*request).appended += rows;
  return true;
}

void BatchPolicy::Choose(PendingList& pending, Batch& batch) {
  batch.Clear();
  for (const Stage stage : {Stage::kDecode, Stage::kExtend, Stage::kPrefill}) {
    StreamRequest* request = pending.front();
    if (stage == Stage::kDecode) {
      // The oldest ready request decides what the launch computes, so that no key starves.
      for (; request != nullptr && !batch.computes; request = PendingList::Next(request)) {
        if (!Computes(*request) || !Ready(*request)) continue;
        batch.key = KeyOf(*request);
        batch.computes = true;
      }
      request = pending.front();
    }
    while (request != nullptr) {
      StreamRequest* const next = PendingList::Next(request);
      const bool fits = !Computes(*request) || (batch.computes && KeyOf(*request) == batch.key);
      if (fits && Ready(*request) && StageOf(*request) == stage && Take(request, stage, batch)) {
        pending.Remove(request);
      }
      request = next;
    }
  }
  batch.OrderByStage();
}

}  // namespace mla::scheduler
