// Holds the contents of one launch: requests, their rows as segments, page work and moves.
#ifndef MLA_SCHEDULER_BATCHING_BATCH_H_
#define MLA_SCHEDULER_BATCHING_BATCH_H_

#include <cstdint>
#include <vector>

#include "scheduler/batching/batch_key.h"
#include "scheduler/batching/head_slice_table.h"
#include "scheduler/batching/launch_cost.h"
#include "scheduler/batching/row_products.h"
#include "scheduler/batching/waiting_requests.h"
#include "scheduler/kvcache/page_moves.h"
#include "scheduler/kvcache/pool/page_work.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

enum class Stage : uint8_t {
  kDecode,   // 1 .. Limits::decode_rows new rows on a cache that is not empty
  kExtend,   // more new rows, on a cache that is not empty
  kPrefill,  // no cache
};

// Consecutive new rows of one sequence at one layer, which become one record of the launch.
struct Segment {
  StreamRequest* request = nullptr;  // the first one of fused slices
  const StepEntry* entry = nullptr;
  int32_t row_begin = 0;  // among the step's rows
  int32_t rows = 0;
  Stage stage = Stage::kDecode;
  int32_t slices = -1;  // index in Batch::slices, or -1: the request alone
  int32_t run = -1;     // index in Batch::runs, or -1
  // Returns the number of rows of the sequence before row_begin: the committed ones and earlier
  // ones of this step.
  int32_t cached() const { return entry->start + row_begin - entry->offset; }
};

// Requests [first, first + count) of a batch are head slices of the same rows. They are computed as
// one request, with their heads next to each other in this order.
struct FusedSlices {
  int32_t first = 0;
  int32_t count = 0;
  int32_t heads = 0;
};

// Consecutive rows of one sequence and layer that came in several requests, because a message has
// room for fewer rows than the expanded form starts at. They are computed as one record in that
// form. A run contains all the rows that its requests launch.
struct RowRun {
  // In Batch::run_segments, which has a run's segments in the order of their rows.
  int32_t first = 0;
  int32_t count = 0;
  int32_t rows = 0;
};

struct Batch {
  std::vector<StreamRequest*>
      requests;                   // of each, the engine.rows_launched rows from engine.rows_done on
  std::vector<Segment> segments;  // decode | extend | prefill
  std::vector<FusedSlices> slices;
  std::vector<RowRun> runs;
  std::vector<int32_t> run_segments;  // indices in segments
  BatchKey key;                       // of the requests that compute; append-only ones fit any key
  bool computes = false;              // false: all requests are append-only
  bool gated = false;                 // the launch waits on the device for tensors
  int32_t rows_by_stage[3] = {0, 0, 0};
  int32_t packed_rows = 0;
  int64_t gather_bytes = 0;  // fused queries and outputs
  int64_t piece_rows = 0;    // as PieceBudget
  RowProducts row_products;
  LaunchUnits units;
  kvcache::LaunchWork pages;              // page work done before everything else of the launch
  std::vector<kvcache::PageMove*> moves;  // parts of page groups that leave or enter the pool
  std::vector<kernels::PageTransfer> page_writes, page_reads;
  int32_t slice_waits_expired = 0;  // groups that went without a sibling they had waited for
  // Groups that went without a sibling that had missed an earlier wait.
  int32_t slice_waits_skipped = 0;

  bool empty() const { return requests.empty() && pages.empty() && moves.empty(); }
  void Clear();
  void OrderByStage();  // stable
  // Finds the runs and counts the units of their rows as in the expanded form. REQUIRES: the
  // segments are in the order of their stages.
  void FindRuns();
  int32_t rows() const { return rows_by_stage[0] + rows_by_stage[1] + rows_by_stage[2]; }

 private:
  void AddRun(int32_t head);

  std::vector<Segment> by_stage_;  // scratch of OrderByStage
};

// A launch has at most this number of ranges of page work, because its metadata has room for so
// many.
inline constexpr int32_t kPageRanges = 4096;

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_BATCH_H_
