#include "scheduler/batching/head_slice_table.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {
namespace {

constexpr MonotonicNanos kNever = std::numeric_limits<MonotonicNanos>::max();

bool SharesHeads(const SliceGroup& group, const AttendArgs& args) {
  for (const StreamRequest* member = group.first; member != nullptr;
       member = HeadSliceTable::Next(member)) {
    const AttendArgs& other = member->attend;
    if (args.head_offset < other.head_offset + other.num_heads &&
        other.head_offset < args.head_offset + args.num_heads) {
      return true;
    }
  }
  return false;
}

StepRank& RankOf(const StreamRequest& request) {
  Step& step = *request.engine.step;
  const auto found = std::find(step.streams.begin(), step.streams.end(), request.stream);
  return step.ranks[found - step.streams.begin()];
}

// Returns true if a launch has taken the rank's slice of the layer's row `row`, of a later row, or
// of a later layer.
bool HasLaunched(const StepRank& rank, int32_t layer, int32_t row) {
  return rank.layer > layer || (rank.layer == layer && rank.end_row > row);
}

// Returns true if a slice of the participant waits in this group or in another one of the layer. It
// waits in another one if it differs, or came too late for the rows that this group has had
// already.
bool Waits(const SliceGroup& group, size_t participant) {
  const Step& step = *group.step;
  if (participant >= step.streams.size()) return false;
  for (const SliceGroup* other = step.layers[group.layer].slices; other != nullptr;
       other = other->next) {
    if (other->end_row <= group.first_row) continue;
    for (const StreamRequest* member = other->first; member != nullptr;
         member = HeadSliceTable::Next(member)) {
      if (member->stream == step.streams[participant]) return true;
    }
  }
  return false;
}

// Returns true if the participant may still bring a slice to the group.
bool IsMissing(const SliceGroup& group, size_t participant) {
  return !HasLaunched(group.step->ranks[participant], group.layer, group.first_row) &&
         !Waits(group, participant);
}

// Returns true if a participant is missing that may come in time.
bool AwaitsSomeone(const SliceGroup& group) {
  for (size_t i = 0; i < group.step->ranks.size(); ++i) {
    if (!group.step->ranks[i].missed && IsMissing(group, i)) return true;
  }
  return false;
}

bool HasAllHeads(const SliceGroup& group) {
  return group.heads >= group.step->model->spec->geometry.num_heads;
}

}  // namespace

HeadSliceTable::HeadSliceTable(const Limits& limits)
    : wait_ns_(limits.slice_wait_us * kNanosPerMicro), members_most_(limits.launch_requests) {
  pool_.reserve(limits.queue_requests);
  free_.reserve(limits.queue_requests);
}

bool HeadSliceTable::JoinsSiblings(const StreamRequest& request) const {
  const AttendArgs& args = request.attend;
  const Step& step = *request.engine.step;
  const Model& model = *step.model;
  if (args.profile == Profile::kAppendOnly || request.engine.repeat) return false;
  // The lists of rows that the ranks bring need not agree.
  if (IsSparse(args) || model.spec->windowed()) return false;
  if (args.num_heads >= model.spec->geometry.num_heads) return false;
  int64_t records = 0;
  for (const StepEntry* entry = EntryOf(step, FirstRow(request));
       entry != step.entries.data() + step.entries.size() && entry->offset < EndRow(request);
       ++entry, ++records) {
    const int32_t rows = std::min(EndRow(request), entry->offset + entry->rows) -
                         std::max(FirstRow(request), entry->offset);
    // The expanded form computes each head separately, so a group would save nothing.
    if (IsExpanded(args.profile) && rows >= model.ExpandedMinRows(args.q_dtype)) {
      return false;
    }
  }
  const int64_t packed = int64_t{EndRow(request) - FirstRow(request)} * args.num_heads;
  return packed < records * model.tile_rows;
}

SliceGroup* HeadSliceTable::FindOrAddGroup(const StreamRequest& request) {
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

void HeadSliceTable::Recount(SliceGroup* group) const {
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
}

void HeadSliceTable::MarkAwaitedRanks(const Step& step, int32_t layer) {
  for (SliceGroup* group = step.layers[layer].slices; group != nullptr; group = group->next) {
    group->awaits = step.participants > 1 && !HasAllHeads(*group) && AwaitsSomeone(*group);
  }
}

void HeadSliceTable::NoteArrival(const StreamRequest& request) const {
  StepRank& rank = RankOf(request);
  if (!rank.missed) return;
  for (const StepRank& sibling : request.engine.step->ranks) {
    if (HasLaunched(sibling, request.attend.layer, FirstRow(request)) &&
        request.engine.arrival_ns - sibling.since >= wait_ns_) {
      return;
    }
  }
  rank.missed = false;
}

void HeadSliceTable::Join(StreamRequest* request) {
  if (!JoinsSiblings(*request)) return;
  if (request->engine.rows_done == 0) NoteArrival(*request);
  SliceGroup* const group = FindOrAddGroup(*request);
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
  MarkAwaitedRanks(*group->step, group->layer);
}

void HeadSliceTable::Leave(StreamRequest* request) {
  SliceGroup* const group = request->engine.group;
  if (group == nullptr) return;
  StreamRequest** link = &group->first;
  while (*link != request) link = &(*link)->engine.sibling;
  *link = request->engine.sibling;
  request->engine.group = nullptr;
  request->engine.sibling = nullptr;
  const Step& step = *group->step;
  const int32_t layer = group->layer;
  if (group->first == nullptr) {
    Free(group);
  } else {
    Recount(group);
  }
  MarkAwaitedRanks(step, layer);
}

GroupOutcome HeadSliceTable::Launch(SliceGroup* group, int32_t rows) {
  Step& step = *group->step;
  const int32_t end_row = group->first_row + rows;
  const bool waited = HeldUntil(*group) > 0;
  for (StreamRequest* member = group->first; member != nullptr;) {
    StepRank& rank = RankOf(*member);
    if (!HasLaunched(rank, group->layer, end_row - 1)) {
      rank = {group->layer, end_row, group->since, rank.missed};
    }
    StreamRequest* const next = Next(member);
    member->engine.group = nullptr;
    member->engine.sibling = nullptr;
    member = next;
  }
  GroupOutcome outcome = waited ? GroupOutcome::kGaveUp : GroupOutcome::kWhole;
  if (wait_ns_ > 0 && step.participants > 1 && !HasAllHeads(*group)) {
    for (size_t i = 0; i < step.ranks.size(); ++i) {
      if (!IsMissing(*group, i)) continue;
      if (!waited) outcome = GroupOutcome::kDidNotWait;
      step.ranks[i].missed = true;
    }
  }
  const int32_t layer = group->layer;
  Free(group);
  MarkAwaitedRanks(step, layer);
  return outcome;
}

void HeadSliceTable::Free(SliceGroup* group) {
  SliceGroup** link = &group->step->layers[group->layer].slices;
  while (*link != group) link = &(*link)->next;
  *link = group->next;
  free_.push_back(group);
}

void HeadSliceTable::RowsAccepted(const Step& step, int32_t layer, MonotonicNanos now) {
  const LayerProgress& progress = step.layers[layer];
  for (SliceGroup* group = progress.slices; group != nullptr; group = group->next) {
    if (group->since == 0 && group->end_row <= progress.accepted) group->since = now;
  }
}

bool HeadSliceTable::Ready(const SliceGroup& group) {
  const LayerProgress& layer = group.step->layers[group.layer];
  return group.appends ? layer.appended == group.first_row : layer.appended >= group.end_row;
}

MonotonicNanos HeadSliceTable::HeldUntil(const SliceGroup& group) const {
  if (wait_ns_ == 0 || !group.awaits) return 0;
  return std::min(group.since + wait_ns_, group.latest);
}

}  // namespace mla::scheduler
