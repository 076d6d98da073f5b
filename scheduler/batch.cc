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
  const ModelSpec& spec = *request.engine.step->model->spec;
  const bool split =
      args.profile == Profile::kExpanded && spec.query_precision == QueryPrecision::kSplit;
  return BatchKey{spec.geometry, args.profile, args.q_dtype, args.o_dtype, split};
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
  slices.clear();
  computes = false;
  rows_by_stage[0] = rows_by_stage[1] = rows_by_stage[2] = 0;
  packed_rows = 0;
  gather_bytes = 0;
  piece_rows = 0;
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

BatchPolicy::BatchPolicy(const Limits& limits, int64_t gather_bytes, const PieceBudget& pieces)
    : limits_(limits), gather_bytes_(gather_bytes), pieces_(pieces), slices_(limits) {}

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

MonotonicNanos BatchPolicy::HeldUntil(const StreamRequest& request) const {
  const SliceGroup* const group = request.engine.group;
  return group == nullptr || !SliceTable::Ready(*group) ? 0 : slices_.HeldUntil(*group);
}

bool BatchPolicy::Goes(const StreamRequest& request, MonotonicNanos now) const {
  const SliceGroup* const group = request.engine.group;
  if (group == nullptr) return Ready(request);
  return SliceTable::Ready(*group) && slices_.HeldUntil(*group) <= now;
}

void BatchPolicy::AddSegments(StreamRequest* request, int32_t rows, int32_t slices, Batch& batch) {
  int32_t row = FirstRow(*request);
  const int32_t end = row + rows;
  for (const StepEntry* entry = EntryOf(*request->engine.step, row); row < end; ++entry) {
    Segment segment{request, entry, row, std::min(end, entry->offset + entry->rows) - row};
    segment.stage = segment.cached() == 0                 ? Stage::kPrefill
                    : segment.rows <= limits_.decode_rows ? Stage::kDecode
                                                          : Stage::kExtend;
    segment.slices = slices;
    batch.rows_by_stage[static_cast<int>(segment.stage)] += segment.rows;
    batch.segments.push_back(segment);
    row += segment.rows;
  }
}

// Of one row and head, at the longest context of the rows that are left.
int64_t BatchPolicy::PiecesOf(const StreamRequest& request) const {
  int64_t kv_rows = 0;
  const std::vector<StepEntry>& entries = request.engine.step->entries;
  for (const StepEntry* entry = EntryOf(*request.engine.step, FirstRow(request));
       entry != entries.data() + entries.size() && entry->offset < EndRow(request); ++entry) {
    kv_rows = std::max(kv_rows, int64_t{entry->start} + entry->rows);
  }
  return pieces_.pieces(kv_rows);
}

BatchPolicy::Demand BatchPolicy::DemandOf(const StreamRequest& request) const {
  Demand demand;
  const SliceGroup* const group = request.engine.group;
  if (group == nullptr || group->members == 1) {
    demand.heads = Computes(request) ? request.attend.num_heads : 0;
    if (pieces_.split_rows > 0) demand.row_pieces = demand.heads * PiecesOf(request);
    return demand;
  }
  demand.members = group->members;
  demand.heads = group->heads;
  if (pieces_.split_rows > 0) demand.row_pieces = demand.heads * PiecesOf(request);
  // In EXPANDED the projections write and read the slices where they are.
  if (group->profile == Profile::kAbsorbed) {
    const ModelSpec& spec = *group->step->model->spec;
    demand.gather_row_bytes =
        int64_t{group->heads} *
        (spec.q_dim(group->profile) * int64_t(kernels::ElementSize(group->q_dtype)) +
         spec.o_dim(group->profile) * int64_t(kernels::ElementSize(group->o_dtype)));
  }
  return demand;
}

int32_t BatchPolicy::RowsThatFit(const StreamRequest& request, const Demand& demand, Stage stage,
                                 const Batch& batch) const {
  int32_t rows = EndRow(request) - FirstRow(request);
  rows = std::min(rows, limits_.launch_rows - batch.rows());
  if (demand.heads > 0) {
    rows = std::min(rows, (limits_.launch_packed_rows - batch.packed_rows) / demand.heads);
  }
  if (demand.gather_row_bytes > 0) {
    const int64_t fit = (gather_bytes_ - batch.gather_bytes) / demand.gather_row_bytes;
    rows = static_cast<int32_t>(std::min<int64_t>(rows, fit));
  }
  if (demand.row_pieces > 0) {
    const int64_t fit = (pieces_.piece_rows - batch.piece_rows) / demand.row_pieces;
    rows = static_cast<int32_t>(std::min<int64_t>(rows, fit));
  }
  if (stage != Stage::kDecode) {
    rows = std::min(rows, limits_.prefill_rows - batch.rows_by_stage[1] - batch.rows_by_stage[2]);
  }
  if (demand.members > limits_.launch_requests - static_cast<int32_t>(batch.requests.size())) {
    return 0;
  }
  // A request has at most as many records as its step has entries.
  const int64_t records = static_cast<int64_t>(request.engine.step->entries.size());
  const int64_t room = limits_.launch_requests - static_cast<int64_t>(batch.segments.size());
  return static_cast<int32_t>(std::min<int64_t>(rows, records <= room ? rows : room));
}

void BatchPolicy::TakeRows(StreamRequest* request, int32_t rows, PendingList& pending,
                           Batch& batch) {
  pending.Remove(request);
  request->engine.batch_index = static_cast<int32_t>(batch.requests.size());
  batch.requests.push_back(request);
  request->engine.rows_launched = rows;
  if (Appends(*request)) Progress(*request).appended += rows;
}

bool BatchPolicy::Take(StreamRequest* request, Stage stage, PendingList& pending, Batch& batch) {
  const Demand demand = DemandOf(*request);
  const int32_t rows = RowsThatFit(*request, demand, stage, batch);
  if (rows <= 0) return false;
  if (pieces_.split_rows > 0 && demand.heads > 0 &&
      rows < RowsThatFit(*request, demand, stage, nothing_)) {
    return false;
  }
  batch.piece_rows += rows * demand.row_pieces;
  batch.packed_rows += rows * demand.heads;
  batch.gather_bytes += rows * demand.gather_row_bytes;
  SliceGroup* const group = request->engine.group;
  if (group == nullptr) {
    AddSegments(request, rows, -1, batch);
    TakeRows(request, rows, pending, batch);
    return true;
  }
  int32_t slices = -1;
  if (group->members > 1) {
    slices = static_cast<int32_t>(batch.slices.size());
    batch.slices.push_back(
        {static_cast<int32_t>(batch.requests.size()), group->members, group->heads});
  }
  const bool anew = request->engine.rows_done == 0;  // not the rest of a group that was cut
  AddSegments(group->first, rows, slices, batch);
  for (StreamRequest* member = group->first; member != nullptr; member = SliceTable::Next(member)) {
    TakeRows(member, rows, pending, batch);
  }
  const Departure departure = slices_.Launch(group, rows);
  batch.slice_waits_expired += anew && departure == Departure::kGaveUp;
  batch.slice_waits_skipped += anew && departure == Departure::kDidNotWait;
  return true;
}

void BatchPolicy::Choose(PendingList& pending, MonotonicNanos now, Batch& batch) {
  batch.Clear();
  for (const Stage stage : {Stage::kDecode, Stage::kExtend, Stage::kPrefill}) {
    StreamRequest* request = pending.front();
    if (stage == Stage::kDecode) {
      // The oldest ready request decides what the launch computes, so that no key starves.
      for (; request != nullptr && !batch.computes; request = PendingList::Next(request)) {
        if (!Computes(*request) || !Goes(*request, now)) continue;
        batch.key = KeyOf(*request);
        batch.computes = true;
      }
      request = pending.front();
    }
    while (request != nullptr) {
      StreamRequest* next = PendingList::Next(request);
      const bool fits = !Computes(*request) || (batch.computes && KeyOf(*request) == batch.key);
      if (fits && Goes(*request, now) && StageOf(*request) == stage) {
        // Siblings leave the list with it.
        const SliceGroup* const group = request->engine.group;
        while (group != nullptr && next != nullptr && next->engine.group == group) {
          next = PendingList::Next(next);
        }
        Take(request, stage, pending, batch);
      }
      request = next;
    }
  }
  batch.OrderByStage();
}

}  // namespace mla::scheduler
