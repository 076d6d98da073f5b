// Open steps and their rules, free of threads and devices.
//
// A step adds rows to some sequences at every layer of their model. It belongs to the stream that
// began it; other streams may take part (tensor-parallel ranks). Per layer it keeps three row
// counts over the step's concatenated rows:
//
//   accepted   rows whose request is queued, launched or done; the next new KV row must be
//              row `accepted`
//   appended   rows whose append is in a submitted launch that does not wait for its client;
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
  // Copies of the sequence's slots, because launches need them for every entry at every layer.
  kvcache::SeqSlot slot = -1, window_slot = -1;
  // Groups into which their last pages are copied, layer by layer (KvCache::copied_group).
  uint32_t copied = kvcache::SlabPool::kNoEntry, window_copied = kvcache::SlabPool::kNoEntry;
};

inline int64_t StartOf(const StepEntry& entry) { return entry.start; }

struct LayerProgress {
  int32_t accepted = 0;
  int32_t appended = 0;
  int32_t stored = 0;
  int32_t writer_head = -1;      // head_offset of the slice that brings the KV rows
  SliceGroup* slices = nullptr;  // head slices that wait, by rows; see head_slice_table.h
};

// State of a participant's head slices in this step; see head_slice_table.h.
struct StepRank {
  int32_t layer = -1;        // the last one at which a launch took a slice of it
  int32_t end_row = 0;       // first row of that layer after that slice
  MonotonicNanos since = 0;  // when that slice could have gone
  bool missed = false;       // it missed a wait of its siblings and has not come in time since
};

struct Step {
  StepId id = 0;
  TenantKey tenant = kNoTenant;
  Model* model = nullptr;
  std::vector<StreamId> streams;  // [0] began it
  int32_t participants = 1;
  std::vector<StepRank> ranks;  // one for each of `participants`; those in `streams` come first
  std::vector<StepEntry> entries;
  int32_t total_rows = 0;
  std::vector<LayerProgress> layers;
  // Its rows may be written once its tenant's page work up to here has been carried; `pages_ready`
  // says that it has.
  kvcache::WorkTicket ticket = 0;
  bool pages_ready = false;
  bool copies = false;  // some entries have pages to be copied
  // A launch of it has failed: the step will be aborted and cannot be committed.
  bool failed = false;
  int64_t lease_ns = 0;
  MonotonicNanos lease_deadline = 0;
  int32_t waiting = 0;           // requests queued
  int32_t inflight = 0;          // requests in a submitted launch
  StreamRequest* end = nullptr;  // EndStep that waits for the above to reach zero

  bool Includes(StreamId stream) const;
  bool idle() const { return waiting == 0 && inflight == 0; }
};

// A step that is gone, remembered for a while so that a late message is told why, until its id is
// used again.
struct AbortedStep {
  TenantKey tenant = kNoTenant;
  StepId id = 0;
  std::string why;
  int64_t committed = 0;  // rows of its first sequence
};

class StepTable {
 public:
  StepTable(const Limits& limits, TenantTable* tenants);

  // The open step, or NOT_FOUND / ABORTED with the reason it is gone.
  absl::StatusOr<Step*> Find(TenantKey tenant, StreamId stream, StepId id);
  // Any open step of the tenant by id, with any participants; null if none.
  Step* Lookup(TenantKey tenant, StepId id);
  // An empty step of the model from the pool, listed as open. RESOURCE_EXHAUSTED when the tenant or
  // the server has as many as its bound says.
  absl::StatusOr<Step*> Create(Model* model, StepId id);
  // Removes the step; `why` not empty remembers it as aborted.
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

// The rules of one Attend against its step; pure. Errors name fields of AttendArgs; `*repeat` is
// set if its KV rows were accepted before.
absl::Status CheckAttend(const Step& step, const AttendArgs& args, bool* repeat);
// Checks that the tails are for different sequences of the step and have the size that its model
// asks for.
absl::Status CheckTails(const Step& step, const std::vector<TailArgs>& tails);
// Equal contents: a repeat by the same stream or a join by another.
bool SameStep(const Step& step, const BeginStepArgs& args);
// Rows and entries that a row of the request attends to, at most, whatever its context; INT64_MAX
// where that alone says how many.
int64_t MostPlaces(const StreamRequest& request);
// Compressed entries that rows [begin, end) of the step make whole at a layer.
inline int64_t EntriesOfRows(const Step& step, int32_t layer, int32_t begin, int32_t end) {
  return EntriesOf(step.entries, step.model->spec->ratio(layer), begin, end);
}
// Committed rows of the sequence that the step's row belongs to. A row past the step's end counts
// as its last sequence's; 0 for a step without sequences.
int64_t CommittedAt(const Step& step, int32_t row);
// Empty when every layer has stored `rows_needed` rows, else "layer 3: rows 2..7, layer 4: ...".
std::string MissingRows(const Step& step, int32_t rows_needed);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_STEP_TABLE_H_
