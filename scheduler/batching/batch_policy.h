// Chooses the contents of a launch from the requests that wait.
//
// Natural batching: when a launch may start, all ready requests go, from any stream, layer or
// sequence, if they share the attention's geometry and dtypes. Bounds are rows, records and
// predicted time (Limits::launch_ms), so nothing waits for one launch for long.
//
// Between tenants, and between the keys of one tenant, the least served goes first
// (waiting_requests.h): it decides the launch's key. Other tenants with requests of that key fill
// the rest, least served first. Within that order decode goes before extend and prefill, which go
// in the order of their arrival. While extend and prefill wait, decode takes at most three quarters
// of a launch; once one of them has waited for several launches, it goes first in every second one.
// As long as decodes come, launches take half of the predicted time. A decode that arrives during a
// launch is then computed within Limits::launch_ms.
//
// A request whose tensors have not come (StreamRequest::engine.ahead) shares a launch only with
// slices of the same rows: the launch waits on the device, and others must not wait for its client.
//
// Head slices of the same rows go together (head_slice_table.h). A step's page work
// (kvcache/page_work.h) goes with the step's first launch. If it is more than one launch may carry,
// the rest goes with earlier launches.
#ifndef MLA_SCHEDULER_BATCHING_BATCH_POLICY_H_
#define MLA_SCHEDULER_BATCHING_BATCH_POLICY_H_

#include <cstdint>
#include <vector>

#include "scheduler/batching/batch.h"
#include "scheduler/batching/head_slice_table.h"
#include "scheduler/batching/launch_cost.h"
#include "scheduler/batching/waiting_requests.h"
#include "scheduler/kvcache/pool/page_work.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Bound of the pieces in one batch for plans with fixed cuts (PlanTraits::fixed_split_rows). A
// packed row counts once for every piece that its context is cut into, and not at all where it is
// not cut.
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
  // `gather_bytes` is the memory of a launch for the queries and outputs of fused slices, if the
  // backend needs them next to each other; it is enough for one row of all heads. `pieces` holds
  // one row of all heads and the longest context, too. With fixed cuts a request is also cut the
  // same way whatever else is in its batch: it waits for a launch that takes as many of its rows as
  // it would get alone.
  BatchPolicy(const Limits& limits, int64_t gather_bytes, const PieceBudget& pieces = {});
  // Lets the policy form runs, because staging brings the rows of several requests together at no
  // cost.
  void FormRuns() { forms_runs_ = true; }
  // Sets the rate of launches that have not been measured (BackendInfo::nanos_per_kv_byte), and
  // forgets what was learned.
  void ExpectRate(double nanos_per_kv_byte) { cost_ = LaunchCost(nanos_per_kv_byte); }

  // Moves the work of the next launch from `waiting` and `work` into `batch`, which is cleared
  // first. Advances the `appended` counts of the steps whose KV rows it takes, also if the launch
  // waits for them. Leaves the batch empty when nothing is ready.
  void Choose(WaitingRequests& waiting, kvcache::PageWorkQueue& work, MonotonicNanos now,
              Batch& batch);
  // Adds the tenant's page work up to the ticket `until`, as far as one launch may carry it.
  void TakePages(kvcache::PageWorkQueue& work, kvcache::TenantKey tenant, kvcache::WorkTicket until,
                 Batch& batch) const;
  // Fills an empty batch with page work of any tenant.
  void TakeAnyPages(kvcache::PageWorkQueue& work, Batch& batch) const;
  // Learns from a launch of this batch, which took `nanos` on the device.
  void Observe(const Batch& batch, int64_t nanos) { cost_.Observe(batch.key, batch.units, nanos); }
  // Returns the number of units of work that take about `nanos` in a launch like this batch.
  int64_t UnitsOf(const Batch& batch, int64_t nanos) const { return cost_.Units(batch.key, nanos); }
  // Returns how long a launch of this batch will take on the device, as predicted.
  int64_t PredictedNanos(const Batch& batch) const { return cost_.Nanos(batch.key, batch.units); }
  // Returns true if the KV rows that the request needs are there, so that it could be part of a
  // launch now.
  static bool Ready(const StreamRequest& request);
  // Returns the stage of the rows that are not launched yet.
  Stage StageOf(const StreamRequest& request) const;
  // Returns true if the request waits for KV rows, and then sets the missing ones, [first, last],
  // as row numbers of its step. Rows that are accepted but not launched yet are not missing.
  static bool WaitsForRows(const StreamRequest& request, int32_t* first, int32_t* last);
  // Returns the time until which a request that could go waits for its sibling slices; in the past
  // if it does not wait.
  MonotonicNanos HeldUntil(const StreamRequest& request) const;
  HeadSliceTable& slices() { return slices_; }

 private:
  // The part of the launch's bounds that a request needs, alone or with its siblings.
  struct Demand {
    int32_t members = 1;
    int32_t heads = 0;
    int64_t gather_row_bytes = 0;
    int64_t row_pieces = 0;  // one row, all heads
  };
  // The number of a request's rows that fit, and their cost.
  struct Fit {
    int32_t rows = 0;
    LaunchUnits units;
  };
  // The state of one choice of a batch.
  struct Round {
    WaitingRequests& waiting;
    kvcache::PageWorkQueue& work;
    MonotonicNanos now;
    Batch& batch;
    int64_t nanos = 0;                         // allowed for the launch
    const LaunchCost::Rates* rates = nullptr;  // for the batch's key
  };
  struct Cursor {  // the requests of a queue from `next` on, which have not been looked at
    RequestQueue* queue;
    StreamRequest* next;
    int misfits;  // requests of the queue that did not fit
  };
  enum class Kind : uint8_t { kDecode, kBulk };

  bool MayLaunch(const StreamRequest& request, MonotonicNanos now) const;
  Demand DemandOf(const StreamRequest& request) const;
  int64_t PiecesOf(const StreamRequest& request) const;
  // Returns the queue whose requests decide the launch's key, or null if no request that computes
  // is ready.
  RequestQueue* Leader(const Round& round) const;
  // Returns the oldest ready request that is not a decode and fits the batch's key, or null.
  const StreamRequest* OldestBulk(const Round& round) const;
  bool FitsKey(const RequestQueue& queue, const Batch& batch) const;
  // Returns false if the launch would make one client wait for another.
  static bool Joins(const StreamRequest& request, const Batch& batch);
  // Takes ready requests of one kind, least served tenants first, while they fit.
  void TakeKind(Kind kind, Round& round);
  // Takes decodes while they fit. Returns false if all of them were the last rows of longer
  // requests.
  bool TakeDecodes(Round& round);
  // Takes the page work that the request waits for. Returns true if all of it fits.
  bool TakePages(const StreamRequest& request, int32_t rows, Round& round);
  bool TakeCopies(const StreamRequest& request, int32_t rows, kvcache::WorkRoom& room,
                  Round& round);
  int32_t RowsThatFit(const StreamRequest& request, const Demand& demand, Stage stage,
                      const Batch& batch) const;
  static Fit AllRows(const StreamRequest& request, const RequestCost& cost, int32_t limit,
                     int32_t min_rows);
  Fit FitTime(const StreamRequest& request, int32_t limit, int32_t heads, const Round& round) const;
  Fit FitWhole(const StreamRequest& request, int32_t rows, int32_t heads, const Round& round) const;
  bool FitsTime(const Round& round, const LaunchUnits& units) const;
  // Takes the request and the rest of its group out of the queues. Returns true if any row fits.
  bool Take(StreamRequest* request, Stage stage, Round& round);
  static void TakeRows(StreamRequest* request, int32_t rows, WaitingRequests& waiting,
                       Batch& batch);
  void AddSegments(StreamRequest* request, int32_t rows, int32_t slices, Batch& batch);

  const Limits limits_;
  const int64_t gather_bytes_;
  const PieceBudget pieces_;
  bool forms_runs_ = false;
  // Launches chosen since the last one with a decode; counted up to a bound.
  int launches_without_decode_ = 0;
  bool bulk_went_first_ = false;  // in the last launch, extend and prefill went first
  const Batch nothing_;           // a launch without requests
  HeadSliceTable slices_;
  LaunchCost cost_;
  std::vector<Cursor> cursors_;  // scratch of TakeKind
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_BATCH_POLICY_H_
