// What one launch computes, and how it is chosen from the requests that wait.
//
// Natural batching: when a launch may start, everything that is ready goes, whatever stream, layer
// or sequence it belongs to, as long as it shares the attention's geometry and dtypes with the
// oldest ready request. Order inside the batch is decode, extend, prefill; extend and prefill are
// cut to a row budget so that they bound a decode's wait.
#ifndef MLA_SCHEDULER_BATCH_H_
#define MLA_SCHEDULER_BATCH_H_

#include <cstdint>
#include <vector>

#include "kernels/attention_desc.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/step_table.h"

namespace mla::scheduler {

// Rows of the step that the request still has to compute: [FirstRow, EndRow).
inline int32_t FirstRow(const StreamRequest& request) {
  return request.attend.row_begin + request.engine.rows_done;
}
inline int32_t EndRow(const StreamRequest& request) {
  return request.attend.row_begin + request.attend.row_count;
}
// Whether it brings new KV rows; a repeat is compared instead.
inline bool Appends(const StreamRequest& request) {
  return request.attend.has_kv && !request.engine.repeat;
}

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
  StreamRequest* request = nullptr;
  const StepEntry* entry = nullptr;
  int32_t row_begin = 0;  // among the step's rows
  int32_t rows = 0;
  Stage stage = Stage::kDecode;
  // Rows of the sequence before row_begin, committed and of this step.
  int32_t cached() const { return entry->start + row_begin - entry->offset; }
};

// What requests must have in common to share a launch.
struct BatchKey {
  kernels::Geometry geometry;
  Profile profile = Profile::kAbsorbed;
  kernels::DType q_dtype = kernels::DType::kBf16;
  kernels::DType o_dtype = kernels::DType::kBf16;
  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

struct Batch {
  std::vector<StreamRequest*>
      requests;                   // engine.rows_launched rows of each, from engine.rows_done on
  std::vector<Segment> segments;  // decode | extend | prefill
  BatchKey key;                   // of the requests that compute; append-only ones fit any
  bool computes = false;          // false: nothing but appends
  int32_t rows_by_stage[3] = {0, 0, 0};
  int32_t packed_rows = 0;

  bool empty() const { return requests.empty(); }
  void Clear();
  void OrderByStage();  // stable
  int32_t rows() const { return rows_by_stage[0] + rows_by_stage[1] + rows_by_stage[2]; }

 private:
  std::vector<Segment> by_stage_;  // scratch of OrderByStage
};

// Chooses batches. Owned by the engine role; allocates nothing once its vectors have grown.
class BatchPolicy {
 public:
  explicit BatchPolicy(const Limits& limits);

  // Moves what goes next from `pending` into `batch` (cleared first) and advances the `appended`
  // counts of the steps whose KV rows it takes. Leaves the batch empty when nothing is ready.
  void Choose(PendingList& pending, Batch& batch);
  // True if the request could be part of a launch now, as far as its KV rows are concerned.
  static bool Ready(const StreamRequest& request);
  // The missing KV rows that a request waits for, [first, last], as row numbers of its step; false
  // if it waits for none (they are accepted and only not launched yet).
  static bool WaitsForRows(const StreamRequest& request, int32_t* first, int32_t* last);

 private:
  Stage StageOf(const StreamRequest& request) const;
  bool Take(StreamRequest* request, Stage stage, Batch& batch);
  void AddSegments(StreamRequest* request, int32_t rows, Batch& batch);

  const Limits limits_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCH_H_
