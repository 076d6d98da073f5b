// The open steps and their rules; independent of threads and devices.
//
// A step adds rows to some sequences at every layer of their model. It belongs to the stream that
// began it; other streams, such as tensor-parallel ranks, may take part. For each layer it counts
// rows, of all its sequences together, in three states:
//
//   accepted   rows whose request is queued, launched or done; the next new KV row must be
//              row `accepted`
//   appended   rows whose append is in a submitted launch that does not wait for its clients;
//              attention over them may be part of the same launch
//   stored     rows whose launch has completed; a repeat is compared with these, and a commit
//              needs these
//
// stored <= appended <= accepted <= total_rows at all times.
// Threading: owned by the engine role. Steps are pooled; nothing is allocated per step once the
// pool is warm.
#ifndef MLA_SCHEDULER_TABLES_STEP_TABLE_H_
#define MLA_SCHEDULER_TABLES_STEP_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "scheduler/clock.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/tables/sequence_table.h"

namespace mla::scheduler {

struct StepEntry {
  Sequence* sequence = nullptr;
  int32_t start = 0;   // committed rows of the sequence when the step began
  int32_t rows = 0;    // rows it adds
  int32_t offset = 0;  // offset of its first row among the step's rows
  // A copy of the sequence's slot, because launches need it for every entry at every layer.
  kvcache::SeqSlot slot = -1;
  // Groups into which the last pages of the sequence are copied, layer by layer.
  kvcache::CopiedGroups copied = {};
};

inline int64_t StartOf(const StepEntry& entry) { return entry.start; }

struct LayerProgress {
  int32_t accepted = 0;
  int32_t appended = 0;
  int32_t stored = 0;
  int32_t writer_head = -1;      // head_offset of the slice that brings the KV rows
  SliceGroup* slices = nullptr;  // waiting head slices, grouped by rows; see head_slice_table.h
};

// State of a participant's head slices in this step; see head_slice_table.h.
struct StepRank {
  int32_t layer = -1;        // the last layer at which a launch took one of its slices
  int32_t end_row = 0;       // first row of that layer after that slice
  MonotonicNanos since = 0;  // when that slice could first have gone
  // Its siblings gave up waiting for it, and it has not come in time since.
  bool missed = false;
};

// The fields of a step except for its lists.
struct StepFields {
  StepId id = 0;
  TenantKey tenant = kNoTenant;
  Model* model = nullptr;
  int32_t participants = 1;
  int32_t total_rows = 0;
  std::shared_ptr<const Tail> rotations;  // of its rows, as in BeginStepArgs
  // The step's rows may be written once the tenant's page work up to this ticket has been carried.
  // `pages_ready` is then true.
  kvcache::WorkTicket ticket = 0;
  bool pages_ready = false;
  bool copies = false;  // some entries have pages to copy
  // A launch of it has failed: the step will be aborted and cannot be committed.
  bool failed = false;
  int64_t lease_ns = 0;
  MonotonicNanos lease_deadline = 0;
  int32_t waiting = 0;           // requests queued
  int32_t inflight = 0;          // requests in a submitted launch
  StreamRequest* end = nullptr;  // an EndStep that waits until both counts are zero
};

struct Step : StepFields {
  std::vector<StreamId> streams;  // [0] began it
  std::vector<StepRank> ranks;    // one for each of `participants`; those in `streams` come first
  std::vector<StepEntry> entries;
  std::vector<LayerProgress> layers;

  void Clear() {  // keeps the memory of its lists
    static_cast<StepFields&>(*this) = {};
    streams.clear();
    ranks.clear();
    entries.clear();
    layers.clear();
  }
  bool Includes(StreamId stream) const;
  bool idle() const { return waiting == 0 && inflight == 0; }
};

// An aborted step. It is remembered for a while, until its id is used again, so that late messages
// get the reason.
struct AbortedStep {
  TenantKey tenant = kNoTenant;
  StepId id = 0;
  std::string why;
  int64_t committed = 0;  // rows of its first sequence
};

class StepTable {
 public:
  StepTable(const Limits& limits, TenantTable* tenants);

  // Returns the open step; or NOT_FOUND, or ABORTED with the reason.
  absl::StatusOr<Step*> Find(TenantKey tenant, StreamId stream, StepId id) const;
  // Returns the tenant's open step with this id, whatever its participants are; null if there is
  // none.
  Step* Lookup(TenantKey tenant, StepId id) const;
  // Takes an empty step from the pool and lists it as open. RESOURCE_EXHAUSTED if the tenant or the
  // server already has as many as its bound allows.
  absl::StatusOr<Step*> Create(Model* model, StepId id);
  // Removes the step. If `why` is not empty, remembers it as aborted.
  void Remove(Step* step, const std::string& why);

  // Renews the step's lease from `now`, which may lie a little in the past.
  static void Touch(Step* step, MonotonicNanos now) {
    step->lease_deadline = std::max(step->lease_deadline, now + step->lease_ns);
  }
  const std::vector<Step*>& open() const { return open_; }

 private:
  void ForgetAborted();

  TenantTable* const tenants_;
  std::vector<std::unique_ptr<Step>> pool_;
  std::vector<Step*> free_;
  std::vector<Step*> open_;
  std::deque<AbortedStep> aborted_;  // the last few
};

// Checks one Attend against its step; changes nothing. Errors name fields of AttendArgs. Sets
// `*repeat` if its KV rows were accepted before.
absl::Status CheckAttend(const Step& step, const AttendArgs& args, bool* repeat);
// Checks that the tails are for different sequences of the step and have the size that its model
// asks for.
absl::Status CheckTails(const Step& step, const std::vector<TailArgs>& tails);
// Checks that the rotations of a step of `rows` rows have the size that its model asks for.
absl::Status CheckRotations(const ModelSpec& spec, int64_t rows, const BeginStepArgs& args);
// Returns true if both have equal contents: a repeat by the same stream or a join by another one.
bool SameStep(const Step& step, const BeginStepArgs& args);
// Returns the most rows and entries that a row of the request attends to, whatever its context is.
// Returns INT64_MAX if only the context limits them.
int64_t MostPlaces(const StreamRequest& request);
// Return the first row of the step that the request still has to compute, and the end of these
// rows.
inline int32_t FirstRow(const StreamRequest& request) {
  return request.attend.row_begin + request.engine.rows_done;
}
inline int32_t EndRow(const StreamRequest& request) {
  return request.attend.row_begin + request.attend.row_count;
}
// Returns true if the request brings new KV rows; rows of a repeat are only compared.
inline bool Appends(const StreamRequest& request) {
  return request.attend.has_kv && !request.engine.repeat;
}
// Returns the entry of the step that contains the row. REQUIRES: 0 <= row < step.total_rows.
inline const StepEntry* EntryOf(const Step& step, int32_t row) {
  const auto after =
      std::upper_bound(step.entries.begin(), step.entries.end(), row,
                       [](int32_t r, const StepEntry& entry) { return r < entry.offset; });
  return &*(after - 1);
}
// Returns the number of compressed entries that rows [begin, end) of the step complete at a layer.
inline int64_t EntriesOfRows(const Step& step, int32_t layer, int32_t begin, int32_t end) {
  return EntriesOf(step.entries, step.model->spec->ratio(layer), begin, end);
}
// Returns the number of committed rows of the sequence that the step's row belongs to. A row past
// the step's end counts as its last sequence's; 0 for a step without sequences.
int64_t CommittedAt(const Step& step, int32_t row);
// Returns "layer 3: rows 2..7, layer 4: ..." with the rows still to be stored, up to row
// `rows_needed`, or an empty string if there are none.
std::string MissingRows(const Step& step, int32_t rows_needed);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_STEP_TABLE_H_
