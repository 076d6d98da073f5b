// What one launch computes, and how it is chosen from the requests that wait.
//
// Natural batching: when a launch may start, everything that is ready goes, whatever stream, layer
// or sequence it belongs to, as long as it shares the attention's geometry and dtypes with the
// oldest ready request. Head slices of the same rows go together (slice_table.h). Order inside the
// batch is decode, extend, prefill; extend and prefill are cut to a row budget so that they bound a
// decode's wait.
#ifndef MLA_SCHEDULER_BATCH_H_
#define MLA_SCHEDULER_BATCH_H_

#include <cstdint>
#include <vector>

#include "kernels/attention_desc.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/rows.h"
#include "scheduler/slice_table.h"
#include "scheduler/step_table.h"

namespace mla::scheduler {

// Requests that wait for a launch, in arrival order. Intrusive: links live in the requests.
class PendingList {
 public:
  StreamRequest* front() const { return head_; }
  static StreamRequest* Next(const StreamRequest* request) { return request->engine.next; }
  bool empty() const { return head_ == nullptr; }
  int32_t size() const { return size_; }
  void PushBack(StreamRequest* request);
  void PushFront(StreamRequest* request);
  void Remove(StreamRequest* request);

 private:
  StreamRequest* head_ = nullptr;
  StreamRequest* tail_ = nullptr;
  int32_t size_ = 0;
};

enum class Stage : uint8_t {
  kDecode,   // 1 .. Limits::decode_rows new rows on a cache that is not empty
  kExtend,   // more new rows on a cache
  kPrefill,  // no cache
};

// Consecutive new rows of one sequence at one layer: one record of the launch.
struct Segment {
  StreamRequest* request = nullptr;  // of fused slices: the first
  const StepEntry* entry = nullptr;
  int32_t row_begin = 0;  // among the step's rows
  int32_t rows = 0;
  Stage stage = Stage::kDecode;
  int32_t slices = -1;  // index in Batch::slices, or -1: the request alone
  // Rows of the sequence before row_begin, committed and of this step.
  int32_t cached() const { return entry->start + row_begin - entry->offset; }
};

// Requests [first, first + count) of a batch that are head slices of the same rows and are computed
// as one, heads side by side in this order.
struct FusedSlices {
  int32_t first = 0;
  int32_t count = 0;
  int32_t heads = 0;
};

// What requests must have in common to share a launch.
struct BatchKey {
  kernels::Geometry geometry;
  Profile profile = Profile::kAbsorbed;
  kernels::DType q_dtype = kernels::DType::kBf16;
  kernels::DType o_dtype = kernels::DType::kBf16;
  bool split_queries = false;  // of EXPANDED: QueryPrecision::kSplit
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

struct Batch {
  std::vector<StreamRequest*>
      requests;                   // engine.rows_launched rows of each, from engine.rows_done on
  std::vector<Segment> segments;  // decode | extend | prefill
  std::vector<FusedSlices> slices;
  BatchKey key;           // of the requests that compute; append-only ones fit any
  bool computes = false;  // false: nothing but appends
  int32_t rows_by_stage[3] = {0, 0, 0};
  int32_t packed_rows = 0;
  int64_t gather_bytes = 0;         // of fused queries and outputs
  int64_t piece_rows = 0;           // as PieceBudget
  int32_t slice_waits_expired = 0;  // groups that went without a sibling they had waited for
  int32_t slice_waits_skipped = 0;  // ... without one that others had waited for in vain

  bool empty() const { return requests.empty(); }
  void Clear();
  void OrderByStage();  // stable
  int32_t rows() const { return rows_by_stage[0] + rows_by_stage[1] + rows_by_stage[2]; }

 private:
  std::vector<Segment> by_stage_;  // scratch of OrderByStage
};

// What plans with fixed cuts (PlanTraits::fixed_split_rows) hold of one batch. A packed row counts
// once for every piece that its context is cut into, and not at all where it is not cut.
struct PieceBudget {
  int32_t split_rows = 0;  // KV rows of a piece; 0: cuts are not fixed, and every batch fits
  int64_t piece_rows = 0;

  int64_t pieces(int64_t kv_rows) const {
    return split_rows == 0 || kv_rows <= split_rows ? 0 : (kv_rows + split_rows - 1) / split_rows;
  }
};

// Chooses batches. Owned by the engine role; allocates nothing once its vectors have grown.
class BatchPolicy {
 public:
  // `gather_bytes`: room of a launch for the queries and outputs of fused slices, where the backend
  // needs them side by side; enough for one row of all heads. `pieces` holds one row of all heads
  // and the longest context, too. With fixed cuts a request is also cut the same way whatever else
  // is in its batch: it waits for one that takes as many of its rows as it gets alone.
  BatchPolicy(const Limits& limits, int64_t gather_bytes, const PieceBudget& pieces = {});

  // Moves what goes next from `pending` into `batch` (cleared first) and advances the `appended`
  // counts of the steps whose KV rows it takes. Leaves the batch empty when nothing is ready.
  void Choose(PendingList& pending, MonotonicNanos now, Batch& batch);
  // True if the request could be part of a launch now, as far as its KV rows are concerned.
  static bool Ready(const StreamRequest& request);
  // The missing KV rows that a request waits for, [first, last], as row numbers of its step; false
  // if it waits for none (they are accepted and only not launched yet).
  static bool WaitsForRows(const StreamRequest& request, int32_t* first, int32_t* last);
  // Until when a request that could go waits for its sibling slices; in the past if it does not.
  MonotonicNanos HeldUntil(const StreamRequest& request) const;
  SliceTable& slices() { return slices_; }

 private:
  // What a request takes of the launch's bounds, alone or with its siblings.
  struct Demand {
    int32_t members = 1;
    int32_t heads = 0;
    int64_t gather_row_bytes = 0;
    int64_t row_pieces = 0;  // of a row, all heads
  };

  Stage StageOf(const StreamRequest& request) const;
  bool Goes(const StreamRequest& request, MonotonicNanos now) const;
  Demand DemandOf(const StreamRequest& request) const;
  int64_t PiecesOf(const StreamRequest& request) const;
  int32_t RowsThatFit(const StreamRequest& request, const Demand& demand, Stage stage,
                      const Batch& batch) const;
  // Takes the request, with all of its group, out of `pending`; false if nothing of it fits.
  bool Take(StreamRequest* request, Stage stage, PendingList& pending, Batch& batch);
  static void TakeRows(StreamRequest* request, int32_t rows, PendingList& pending, Batch& batch);
  void AddSegments(StreamRequest* request, int32_t rows, int32_t slices, Batch& batch);

  const Limits limits_;
  const int64_t gather_bytes_;
  const PieceBudget pieces_;
  const Batch nothing_;  // a launch without requests
  SliceTable slices_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCH_H_
