#include "scheduler/slice_table.h"

#include <algorithm>
#include <limits>

#include "scheduler/rows.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kNanosPerMicro = 1'000;
constexpr MonotonicNanos kNever = std::numeric_limits<MonotonicNanos>::max();

bool SharesHeads(const SliceGroup& group, const AttendArgs& args) {
  for (const StreamRequest* member = group.first; member != nullptr;
       member = SliceTable::Next(member)) {
    const AttendArgs& other = member->attend;
    if (args.head_offset < other.head_offset + other.num_heads &&
        other.head_offset < args.head_offset + args.num_heads) {
      return true;
    }
  }
  return false;
}

// Whether every participant has sent a slice.
bool EveryStream(const SliceGroup& group) {
  const Step& step = *group.step;
  if (static_cast<int32_t>(step.streams.size()) < step.participants) return false;
  return std::all_of(step.streams.begin(), step.streams.end(), [&](StreamId stream) {
    const StreamRequest* member = group.first;
    while (member != nullptr && member->stream != stream) member = SliceTable::Next(member);
    return member != nullptr;
  });
}

}  // namespace

SliceTable::SliceTable(const Limits& limits)
    : wait_ns_(limits.slice_wait_us * kNanosPerMicro), members_most_(limits.launch_requests) {
  pool_.reserve(limits.queue_requests);
  free_.reserve(limits.queue_requests);
}

bool SliceTable::Gains(const StreamRequest& request) const {
  const AttendArgs& args = request.attend;
  const Step& step = *request.engine.step;
  const Model& model = *step.model;
  if (args.profile == Profile::kAppendOnly || request.engine.repeat) return false;
  if (args.num_heads >= model.spec->geometry.num_heads) return false;
  int64_t records = 0;
  for (const StepEntry* entry = EntryOf(step, FirstRow(request));
       entry != step.entries.data() + step.entries.size() && entry->offset < EndRow(request);
       ++entry, ++records) {
    const int32_t rows = std::min(EndRow(request), entry->offset + entry->rows) -
                         std::max(FirstRow(request), entry->offset);
    // The expanded form computes each head for itself.
    if (args.profile == Profile::kExpanded && rows >= model.ExpandedMinRows(args.q_dtype)) {
      return false;
    }
  }
  const int64_t packed = int64_t{EndRow(request) - FirstRow(request)} * args.num_heads;
  return packed < records * model.tile_rows;
}

SliceGroup* SliceTable::GroupFor(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  Step* const step = request.engine.step;
  SliceGroup*& layer = step->layers[args.layer].slices;
  for (SliceGroup* group = layer; group != nullptr; group = group->next) {
    if (group->first_row == FirstRow(request) && group->end_row == EndRow(request) &&
        group->profile == args.profile && group->q_dtype == args.q_dtype &&
        group->o_dtype == args.o_dtype && group->members < members_most_ &&
        !SharesHeads(*group, args)) {
      return group;
    }
  }
  if (free_.empty()) {
    pool_.push_back(std::make_unique<SliceGroup>());
    free_.push_back(pool_.back().get());
  }
  SliceGroup* const group = free_.back();
  free_.pop_back();
  *group = SliceGroup();
  group->step = step;
  group->layer = args.layer;
  group->first_row = FirstRow(request);
  group->end_row = EndRow(request);
  group->profile = args.profile;
  group->q_dtype = args.q_dtype;
  group->o_dtype = args.o_dtype;
  group->next = layer;
  layer = group;
  return group;
}

void SliceTable::Recount(SliceGroup* group) const {
  group->members = 0;
  group->heads = 0;
  group->appends = group->first != nullptr && Appends(*group->first);
  group->latest = kNever;
  for (const StreamRequest* member = group->first; member != nullptr; member = Next(member)) {
    const StreamRequest::EngineFields& note = member->engine;
    ++group->members;
    group->heads += member->attend.num_heads;
    group->latest =
        std::min(group->latest, note.arrival_ns + (note.deadline_ns - note.arrival_ns) / 2);
  }
  group->complete = group->heads >= group->step->model->spec->geometry.num_heads ||
                    (group->step->participants > 1 && EveryStream(*group));
}

void SliceTable::Join(StreamRequest* request) {
  if (!Gains(*request)) return;
  SliceGroup* const group = GroupFor(*request);
  request->engine.group = group;
  request->engine.sibling = nullptr;
  if (Appends(*request)) {
    request->engine.sibling = group->first;
    group->first = request;
  } else {
    StreamRequest** end = &group->first;
    while (*end != nullptr) end = &(*end)->engine.sibling;
    *end = request;
  }
  const LayerProgress& layer = group->step->layers[group->layer];
  if (group->since == 0 && layer.accepted >= group->end_row) {
    group->since = request->engine.arrival_ns;
  }
  Recount(group);
}

void SliceTable::Leave(StreamRequest* request) {
  SliceGroup* const group = request->engine.group;
  if (group == nullptr) return;
  StreamRequest** link = &group->first;
  while (*link != request) link = &(*link)->engine.sibling;
  *link = request->engine.sibling;
  request->engine.group = nullptr;
  request->engine.sibling = nullptr;
  if (group->first == nullptr) {
    Free(group);
  } else {
    Recount(group);
  }
}

void SliceTable::Dissolve(SliceGroup* group) {
  for (StreamRequest* member = group->first; member != nullptr;) {
    StreamRequest* const next = Next(member);
    member->engine.group = nullptr;
    member->engine.sibling = nullptr;
    member = next;
  }
  Free(group);
}

void SliceTable::Free(SliceGroup* group) {
  SliceGroup** link = &group->step->layers[group->layer].slices;
  while (*link != group) link = &(*link)->next;
  *link = group->next;
  free_.push_back(group);
}

void SliceTable::RowsAccepted(const Step& step, int32_t layer, MonotonicNanos now) {
  const LayerProgress& progress = step.layers[layer];
  for (SliceGroup* group = progress.slices; group != nullptr; group = group->next) {
    if (group->since == 0 && group->end_row <= progress.accepted) group->since = now;
  }
}

bool SliceTable::Ready(const SliceGroup& group) {
  const LayerProgress& layer = group.step->layers[group.layer];
  return group.appends ? layer.appended == group.first_row : layer.appended >= group.end_row;
}

MonotonicNanos SliceTable::HeldUntil(const SliceGroup& group) const {
  if (wait_ns_ == 0 || group.complete || group.step->participants < 2) return 0;
  return std::min(group.since + wait_ns_, group.latest);
}

}  // namespace mla::scheduler
