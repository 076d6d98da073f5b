// Groups the waiting requests that are head slices of the same rows.
//
// The ranks of a tensor-parallel worker send the heads of a (sequence, layer, step) apart. Slices
// of the same rows that are computed together read the KV rows once instead of once a rank. They
// therefore form a group, which goes into one launch as one record over all its heads. A group
// waits for missing siblings at most Limits::slice_wait_us from the moment at which it could have
// gone. It also waits at most half of the time that one of its members has left before its own
// deadline. No other request waits for a group.
//
// A group waits for the participants without a slice in it, with two exceptions, which are learned
// within the step. One: participants whose slice is elsewhere already. It waits in another group
// with these rows (it has another dtype, say), with later rows or with a later layer, or a launch
// has taken it (a late sibling makes a group of its own and goes at once). Two: participants that
// missed an earlier wait and have not come in time since. A slice is in time if it comes before any
// sibling was launched, or less than slice_wait_us after the group could have gone. So a rank that
// sends no heads, or is late at every layer, costs its siblings one wait a step. A rank that was
// late once is waited for again from the layer after the first one at which it is in time.
//
// Only small slices are grouped: when the rows of a slice alone fill the backend's tiles, grouping
// would not reduce the reads of KV rows. A step of one participant has no siblings to wait for; its
// slices are grouped if they happen to be there together.
//
// Ownership: the table owns the groups; a group borrows its members while they wait. Threading:
// owned by the engine role. Groups are pooled; nothing is allocated once the pool is warm.
#ifndef MLA_SCHEDULER_BATCHING_HEAD_SLICE_TABLE_H_
#define MLA_SCHEDULER_BATCHING_HEAD_SLICE_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "scheduler/clock.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

struct SliceGroup {
  // --- What its members have in common.
  Step* step = nullptr;
  int32_t layer = 0;
  int32_t first_row = 0, end_row = 0;  // row numbers of the step; the rows still to be computed
  Profile profile = Profile::kAbsorbed;
  kernels::DType q_dtype = kernels::DType::kBf16;
  kernels::DType o_dtype = kernels::DType::kBf16;
  // --- Members in the order of arrival. A member that brings the KV rows goes to the front.
  StreamRequest* first = nullptr;
  int32_t members = 0;
  int32_t heads = 0;     // of all members, without repeats
  bool appends = false;  // `first` brings the KV rows
  bool awaits = false;   // a participant that may come in time is missing
  // When the group could first have gone; 0: its KV rows have not come yet.
  MonotonicNanos since = 0;
  // The first time at which a member has used half of its time before its deadline.
  MonotonicNanos latest = 0;
  SliceGroup* next = nullptr;  // next group of the same step and layer
};

// Says how a group went.
enum class GroupOutcome : uint8_t {
  kWhole,      // with every head, or when no other slice could come any more
  kGaveUp,     // without a sibling that it had waited for
  kDidNotWait  // without a sibling that had missed an earlier wait
};

class HeadSliceTable {
 public:
  explicit HeadSliceTable(const Limits& limits);

  // Adds a waiting request to the group that it belongs to. Ignores requests that would not gain
  // from a group. REQUIRES: engine.step is set, and the request is in no group.
  void Join(StreamRequest* request);
  // Removes a request that does not wait any more; ignored if it is in no group.
  void Leave(StreamRequest* request);
  // Takes all members out of the group, to be launched together with the next `rows` of their rows,
  // and notes in the step that these were launched.
  GroupOutcome Launch(SliceGroup* group, int32_t rows);
  // Call it at `now`, when the KV rows [0, accepted) of the layer have come.
  static void RowsAccepted(const Step& step, int32_t layer, MonotonicNanos now);

  // Returns true if the KV rows that the group needs are there, so that it could be part of a
  // launch.
  static bool Ready(const SliceGroup& group);
  // Returns the time until which the group waits for siblings; it is in the past (or 0) if it does
  // not wait.
  MonotonicNanos HeldUntil(const SliceGroup& group) const;
  static StreamRequest* Next(const StreamRequest* member) { return member->engine.sibling; }

 private:
  bool JoinsSiblings(const StreamRequest& request) const;
  // Called when the request has come: if it came in time, siblings wait for its stream again.
  void NoteArrival(const StreamRequest& request) const;
  SliceGroup* FindOrAddGroup(const StreamRequest& request);
  void Recount(SliceGroup* group) const;
  // Marks the ranks that each group of the layer waits for; they follow from all its groups.
  static void MarkAwaitedRanks(const Step& step, int32_t layer);
  void Free(SliceGroup* group);

  const int64_t wait_ns_;
  const int32_t members_most_;  // the most members that a launch can take at once
  std::vector<std::unique_ptr<SliceGroup>> pool_;
  std::vector<SliceGroup*> free_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_HEAD_SLICE_TABLE_H_
