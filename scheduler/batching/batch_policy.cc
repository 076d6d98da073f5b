#include "scheduler/batching/batch_policy.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "scheduler/batching/gated_requests.h"

namespace mla::scheduler {
namespace {

// While extend or prefill requests wait, decode takes at most this part of a launch's time.
constexpr int64_t kDecodeParts = 3, kParts = 4;
// While decodes keep coming, a launch may take only this part of limits.launch_ms. A decode that
// has just missed a launch waits for it and then for its own.
constexpr int64_t kLaunchesOfAWait = 2;
// Decodes have stopped coming once this many launches were chosen without one.
constexpr int kLaunchesWithoutDecode = 16;
// Extend and prefill that waited for this many launches go before decode in every second launch.
constexpr int64_t kAgedLaunches = 8;
// After this many requests of a queue did not fit, the rest of the queue is left to a later launch.
constexpr int kMisfits = 16;

// A request takes the expanded form for a sequence that has at least this many of its rows. If it
// never does, the number is larger than the rows of any request.
int32_t ExpandedMinRows(const StreamRequest& request, int32_t heads) {
  const AttendArgs& args = request.attend;
  const bool may_expand = IsExpanded(args.profile) && heads == args.num_heads && !IsSparse(args);
  return may_expand ? request.engine.step->model->ExpandedMinRows(args.q_dtype)
                    : std::numeric_limits<int32_t>::max();
}

LayerProgress& Progress(const StreamRequest& request) {
  return request.engine.step->layers[request.attend.layer];
}

}  // namespace

BatchPolicy::BatchPolicy(const Limits& limits, int64_t gather_bytes, const PieceBudget& pieces)
    : limits_(limits), gather_bytes_(gather_bytes), pieces_(pieces), slices_(limits) {}

bool BatchPolicy::Ready(const StreamRequest& request) {
  const LayerProgress& layer = Progress(request);
  if (request.engine.repeat) return layer.stored >= EndRow(request);
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
  return group == nullptr || !HeadSliceTable::Ready(*group) ? 0 : slices_.HeldUntil(*group);
}

bool BatchPolicy::MayLaunch(const StreamRequest& request, MonotonicNanos now) const {
  if (request.engine.apart) return false;
  const SliceGroup* const group = request.engine.group;
  if (group == nullptr) return Ready(request);
  for (const StreamRequest* member = group->first; member != nullptr;
       member = HeadSliceTable::Next(member)) {
    if (member->engine.apart) return false;
  }
  return HeadSliceTable::Ready(*group) && slices_.HeldUntil(*group) <= now;
}

void BatchPolicy::AddSegments(StreamRequest* request, int32_t rows, int32_t slices, Batch& batch) {
  int32_t row = FirstRow(*request);
  const int32_t end = row + rows;
  for (const StepEntry* entry = EntryOf(*request->engine.step, row); row < end; ++entry) {
    const int32_t part = std::min(end, entry->offset + entry->rows) - row;
    const int32_t cached = entry->start + row - entry->offset;
    const Stage stage = cached == 0                   ? Stage::kPrefill
                        : part <= limits_.decode_rows ? Stage::kDecode
                                                      : Stage::kExtend;
    batch.rows_by_stage[static_cast<int>(stage)] += part;
    batch.segments.emplace_back(request, entry, row, part, stage, slices);
    row += part;
  }
}

// Returns the number of pieces of one row and head, at the longest context of the rows that are
// left.
int64_t BatchPolicy::PiecesOf(const StreamRequest& request) const {
  int64_t kv_rows = 0;
  const std::vector<StepEntry>& entries = request.engine.step->entries;
  for (const StepEntry* entry = EntryOf(*request.engine.step, FirstRow(request));
       entry != entries.data() + entries.size() && entry->offset < EndRow(request); ++entry) {
    kv_rows = std::max(kv_rows, int64_t{entry->start} + entry->rows);
  }
  kv_rows = std::min(kv_rows, MostPlaces(request));
  return pieces_.pieces(kv_rows);
}

BatchPolicy::Demand BatchPolicy::DemandOf(const StreamRequest& request) const {
  Demand demand;
  const SliceGroup* const group = request.engine.group;
  if (group == nullptr || group->members == 1) {
    demand.heads = Computes(request) ? request.attend.num_heads : 0;
    if (pieces_.split_rows > 0) demand.row_pieces = demand.heads * PiecesOf(request);
    demand.gather_row_bytes = ProjectedRowBytes(request);
    return demand;
  }
  demand.members = group->members;
  demand.heads = group->heads;
  if (pieces_.split_rows > 0) demand.row_pieces = demand.heads * PiecesOf(request);
  // In EXPANDED no gathering is needed: the projections read and write the slices where they are.
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

bool BatchPolicy::FitsTime(const Round& round, const LaunchUnits& units) const {
  return cost_.Nanos(*round.rates, round.batch.units + units) <= round.nanos;
}

// Units of the first `limit` rows; `min_rows` rows of a sequence, or more, take the expanded form.
BatchPolicy::Fit BatchPolicy::AllRows(const StreamRequest& request, const RequestCost& cost,
                                      int32_t limit, int32_t min_rows) {
  Fit fit{limit, {}};
  int32_t row = FirstRow(request);
  const int32_t end = row + limit;
  for (const StepEntry* entry = EntryOf(*request.engine.step, row); row < end; ++entry) {
    const int32_t rows = std::min(end, entry->offset + entry->rows) - row;
    fit.units += cost.Of(*entry, row, rows, rows >= min_rows);
    row += rows;
  }
  return fit;
}

// As many of the first `limit` rows as the time allows; at least one row if the batch is empty.
BatchPolicy::Fit BatchPolicy::FitTime(const StreamRequest& request, int32_t limit, int32_t heads,
                                      const Round& round) const {
  const RequestCost cost(request, heads);
  const int32_t min_rows = ExpandedMinRows(request, heads);
  Fit fit = AllRows(request, cost, limit, min_rows);
  if (FitsTime(round, fit.units)) return fit;
  fit = Fit();
  const int32_t first = FirstRow(request);
  for (const StepEntry* entry = EntryOf(*request.engine.step, first); fit.rows < limit; ++entry) {
    const int32_t row = first + fit.rows;
    const int32_t rows = std::min(first + limit, entry->offset + entry->rows) - row;
    // Returns the largest part of [low, high] rows that fits, or 0.
    const auto largest = [&](int32_t low, int32_t high, bool expands, LaunchUnits* units) {
      int32_t best = 0;
      for (int32_t tried = high; low <= high; tried = low + (high - low) / 2) {
        const LaunchUnits more = cost.Of(*entry, row, tried, expands);
        if (FitsTime(round, fit.units + more)) {
          best = tried;
          *units = more;
          low = tried + 1;
        } else {
          high = tried - 1;
        }
      }
      return best;
    };
    LaunchUnits units;
    int32_t fitting = 0;
    if (rows >= min_rows) fitting = largest(min_rows, rows, true, &units);
    // None fits in the expanded form: try fewer rows than it starts at, in the absorbed form.
    if (fitting == 0) {
      fitting = largest(1, std::min(rows, min_rows - 1), false, &units);
    }
    if (fitting == 0 && fit.rows == 0 && round.batch.empty()) {
      fitting = 1;
      units = cost.Of(*entry, row, 1, min_rows <= 1);
    }
    fit.rows += fitting;
    fit.units += units;
    if (fitting < rows) break;
  }
  return fit;
}

// Fits all of the first `rows` rows or none. A launch that has nothing else to do takes them even
// if they exceed its time.
BatchPolicy::Fit BatchPolicy::FitWhole(const StreamRequest& request, int32_t rows, int32_t heads,
                                       const Round& round) const {
  const Fit fit =
      AllRows(request, RequestCost(request, heads), rows, ExpandedMinRows(request, heads));
  return round.batch.empty() || FitsTime(round, fit.units) ? fit : Fit();
}

bool BatchPolicy::TakePages(const StreamRequest& request, int32_t rows, Round& round) {
  Step& step = *request.engine.step;
  if (step.pages_ready && !step.copies) return true;
  Batch& batch = round.batch;
  const int64_t before = batch.pages.bytes();
  const int64_t left = round.nanos - cost_.Nanos(*round.rates, batch.units);
  kvcache::WorkRoom room{kPageRanges - batch.pages.places(),
                         cost_.PageBytes(std::max<int64_t>(0, left)), batch.empty()};
  step.pages_ready = round.work.Take(step.tenant, step.ticket, &room, &batch.pages);
  const bool ready = step.pages_ready && (!step.copies || TakeCopies(request, rows, room, round));
  const int64_t bytes = batch.pages.bytes() - before;
  batch.units.pages += bytes;
  if (bytes > 0) round.waiting.AddService(request.engine.queue, bytes);
  return ready;
}

// Takes the copies for sequences whose first rows at the layer are among the next `rows` rows.
bool BatchPolicy::TakeCopies(const StreamRequest& request, int32_t rows, kvcache::WorkRoom& room,
                             Round& round) {
  const int32_t layer = request.attend.layer, appended = Progress(request).appended;
  const StepEntry* entry = EntryOf(*request.engine.step, FirstRow(request));
  for (int32_t row = FirstRow(request), end = row + rows; row < end; ++entry) {
    row = entry->offset + entry->rows;
    if (entry->offset < appended) continue;
    for (const uint32_t group : entry->copied.by_list) {
      if (!round.work.TakeLayer(group, layer, &room, &round.batch.pages)) return false;
    }
  }
  return true;
}

void BatchPolicy::TakeRows(StreamRequest* request, int32_t rows, WaitingRequests& waiting,
                           Batch& batch) {
  waiting.Remove(request);
  request->engine.batch_index = static_cast<int32_t>(batch.requests.size());
  batch.requests.push_back(request);
  request->engine.rows_launched = rows;
  batch.gated |= request->engine.ahead;
  if (Appends(*request)) Progress(*request).appended += rows;
}

bool BatchPolicy::Take(StreamRequest* request, Stage stage, Round& round) {
  Batch& batch = round.batch;
  if (!batch.row_products.Fits(*request)) return false;
  const Demand demand = DemandOf(*request);
  const int32_t row_limit = RowsThatFit(*request, demand, stage, batch);
  if (row_limit <= 0) return false;
  const bool fixed = pieces_.split_rows > 0 && demand.heads > 0;
  if (fixed && row_limit < RowsThatFit(*request, demand, stage, nothing_)) return false;
  if (!TakePages(*request, row_limit, round)) return false;
  const Fit fit = fixed ? FitWhole(*request, row_limit, demand.heads, round)
                        : FitTime(*request, row_limit, demand.heads, round);
  if (fit.rows <= 0) return false;
  const int32_t rows = fit.rows;
  batch.row_products.Add(*request);
  batch.piece_rows += rows * demand.row_pieces;
  batch.packed_rows += rows * demand.heads;
  batch.gather_bytes += rows * demand.gather_row_bytes;
  batch.units += fit.units;
  round.waiting.AddService(request->engine.queue, fit.units.sum());
  SliceGroup* const group = request->engine.group;
  if (group == nullptr) {
    AddSegments(request, rows, -1, batch);
    TakeRows(request, rows, round.waiting, batch);
    return true;
  }
  int32_t slices = -1;
  if (group->members > 1) {
    slices = static_cast<int32_t>(batch.slices.size());
    batch.slices.push_back(
        {static_cast<int32_t>(batch.requests.size()), group->members, group->heads});
  }
  const bool is_new = request->engine.rows_done == 0;  // false: the rest of a group that was cut
  AddSegments(group->first, rows, slices, batch);
  for (StreamRequest* member = group->first; member != nullptr;
       member = HeadSliceTable::Next(member)) {
    TakeRows(member, rows, round.waiting, batch);
  }
  const GroupOutcome outcome = slices_.Launch(group, rows);
  batch.slice_waits_expired += is_new && outcome == GroupOutcome::kGaveUp;
  batch.slice_waits_skipped += is_new && outcome == GroupOutcome::kDidNotWait;
  return true;
}

RequestQueue* BatchPolicy::Leader(const Round& round) const {
  RequestQueue* leader = nullptr;
  const auto before = [](const RequestQueue& a, const RequestQueue& b) {
    if (a.share->virtual_time != b.share->virtual_time) {
      return a.share->virtual_time < b.share->virtual_time;
    }
    if (a.share == b.share && a.virtual_time != b.virtual_time) {
      return a.virtual_time < b.virtual_time;
    }
    return a.head->engine.order < b.head->engine.order;
  };
  for (TenantShare* share : round.waiting.shares()) {
    bool goes = false;
    for (RequestQueue* queue : share->queues) {
      const StreamRequest* request = queue->head;
      while (request != nullptr && !MayLaunch(*request, round.now)) {
        request = WaitingRequests::NextInQueue(request);
      }
      if (request == nullptr) {
        WaitingRequests::SkipQueue(queue);
        continue;
      }
      goes = true;
      if (queue->key.profile == Profile::kAppendOnly) continue;
      if (leader == nullptr || before(*queue, *leader)) leader = queue;
    }
    if (!goes) round.waiting.SkipTenant(share);
  }
  return leader;
}

bool BatchPolicy::FitsKey(const RequestQueue& queue, const Batch& batch) const {
  return queue.key.profile == Profile::kAppendOnly || (batch.computes && queue.key == batch.key);
}

bool BatchPolicy::Joins(const StreamRequest& request, const Batch& batch) {
  return batch.requests.empty() || !(batch.gated || request.engine.ahead) ||
         AreSlices(request, *batch.requests.front());
}

const StreamRequest* BatchPolicy::OldestBulk(const Round& round) const {
  const StreamRequest* oldest = nullptr;
  for (const TenantShare* share : round.waiting.shares()) {
    for (const RequestQueue* queue : share->queues) {
      if (!FitsKey(*queue, round.batch)) continue;
      const StreamRequest* request = queue->head;
      while (request != nullptr &&
             (!MayLaunch(*request, round.now) || StageOf(*request) == Stage::kDecode)) {
        request = WaitingRequests::NextInQueue(request);
      }
      if (request == nullptr) continue;
      if (oldest == nullptr || request->engine.blocked_since_ns < oldest->engine.blocked_since_ns) {
        oldest = request;
      }
    }
  }
  return oldest;
}

void BatchPolicy::TakeKind(Kind kind, Round& round) {
  cursors_.clear();
  for (const TenantShare* share : round.waiting.shares()) {
    for (RequestQueue* queue : share->queues) {
      if (queue->head != nullptr && FitsKey(*queue, round.batch)) {
        cursors_.push_back({queue, queue->head, 0});
      }
    }
  }
  while (!cursors_.empty()) {
    const auto least =
        std::min_element(cursors_.begin(), cursors_.end(), [](const Cursor& a, const Cursor& b) {
          if (a.queue->share->virtual_time != b.queue->share->virtual_time) {
            return a.queue->share->virtual_time < b.queue->share->virtual_time;
          }
          // Appended rows go first, because other requests of the same launch may read them.
          return a.queue->key.profile == Profile::kAppendOnly &&
                 b.queue->key.profile != Profile::kAppendOnly;
        });
    StreamRequest* const request = least->next;
    if (request == nullptr || least->misfits == kMisfits) {
      cursors_.erase(least);
      continue;
    }
    StreamRequest* next = WaitingRequests::NextInQueue(request);
    if (Joins(*request, round.batch) && MayLaunch(*request, round.now)) {
      const Stage stage = StageOf(*request);
      if ((stage == Stage::kDecode) == (kind == Kind::kDecode)) {
        // Taking the request takes its siblings out of the queue, too.
        const SliceGroup* const group = request->engine.group;
        while (group != nullptr && next != nullptr && next->engine.group == group) {
          next = WaitingRequests::NextInQueue(next);
        }
        if (!Take(request, stage, round)) ++least->misfits;
      }
    }
    least->next = next;
  }
}

bool BatchPolicy::TakeDecodes(Round& round) {
  const std::vector<StreamRequest*>& requests = round.batch.requests;
  const auto before = static_cast<std::ptrdiff_t>(requests.size());
  TakeKind(Kind::kDecode, round);
  // The last rows of a longer request may be as few as a decode's; they do not count.
  return std::any_of(requests.begin() + before, requests.end(),
                     [](const StreamRequest* request) { return request->engine.rows_done == 0; });
}

void BatchPolicy::TakePages(kvcache::PageWorkQueue& work, kvcache::TenantKey tenant,
                            kvcache::WorkTicket until, Batch& batch) const {
  const int64_t before = batch.pages.bytes();
  const int64_t left = limits_.launch_ms * kNanosPerMilli - cost_.Nanos(batch.key, batch.units);
  kvcache::WorkRoom room{kPageRanges - batch.pages.places(),
                         cost_.PageBytes(std::max<int64_t>(0, left)), batch.empty()};
  work.Take(tenant, until, &room, &batch.pages);
  batch.units.pages += batch.pages.bytes() - before;
}

void BatchPolicy::TakeAnyPages(kvcache::PageWorkQueue& work, Batch& batch) const {
  kvcache::WorkRoom room{kPageRanges, cost_.PageBytes(limits_.launch_ms * kNanosPerMilli)};
  work.TakeAny(&room, &batch.pages);
  batch.units.pages += batch.pages.bytes();
}

void BatchPolicy::Choose(WaitingRequests& waiting, kvcache::PageWorkQueue& work, MonotonicNanos now,
                         Batch& batch) {
  batch.Clear();
  waiting.Prune();
  const int64_t whole = limits_.launch_ms * kNanosPerMilli;
  const int64_t part = whole / kLaunchesOfAWait;
  const int64_t nanos = launches_without_decode_ < kLaunchesWithoutDecode ? part : whole;
  Round round{waiting, work, now, batch, nanos, &cost_.Of(batch.key)};
  if (const RequestQueue* const leader = Leader(round); leader != nullptr) {
    batch.key = leader->key;
    batch.computes = true;
    round.rates = &cost_.Of(batch.key);
    waiting.Serve(*leader);
  }
  const StreamRequest* const bulk = OldestBulk(round);
  // Only every second launch: one row may fill one, and decodes must not wait for whole prompts.
  const bool aged = bulk != nullptr && now - bulk->engine.blocked_since_ns >= kAgedLaunches * whole;
  bulk_went_first_ = aged && !bulk_went_first_;
  bool decodes = false;
  if (bulk_went_first_) {
    TakeKind(Kind::kBulk, round);
    decodes = TakeDecodes(round);
  } else {
    if (bulk != nullptr) round.nanos = nanos / kParts * kDecodeParts;
    decodes = TakeDecodes(round);
    round.nanos = decodes ? part : nanos;
    if (bulk != nullptr) TakeKind(Kind::kBulk, round);
  }
  // Passes over the slices that came before the one with the KV rows.
  if (batch.gated && batch.requests.front()->engine.step->participants > 1) {
    TakeKind(Kind::kDecode, round);
    TakeKind(Kind::kBulk, round);
  }
  if (decodes) {
    launches_without_decode_ = 0;
  } else if (launches_without_decode_ < kLaunchesWithoutDecode) {
    ++launches_without_decode_;
  }
  batch.OrderByStage();
  if (forms_runs_) batch.FindRuns();
}

}  // namespace mla::scheduler
