// A batch with the launch that it becomes, in one slot of the backend: the records that the launch
// refers to, and the memory that it shares between requests. All of it is made at start.
#ifndef MLA_SCHEDULER_LAUNCHING_BATCH_LAUNCH_H_
#define MLA_SCHEDULER_LAUNCHING_BATCH_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/launch_layout.h"
#include "kernels/types/launch.h"
#include "scheduler/batching/batch.h"
#include "scheduler/engine.h"
#include "scheduler/launching/records_origin.h"
#include "scheduler/limits.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler {

// Fragmented inputs, by the index of their record. Launches have few, and most none.
class FragmentsByRecord {
 public:
  void Reserve(int32_t most) { all_.reserve(static_cast<size_t>(most)); }
  void Clear() { all_.clear(); }
  // Adds the input of record `index`; inputs of earlier records must have been added before.
  void Add(size_t index, const kernels::FragmentedInput& input) {
    if (input.bytes == 0) return;
    all_.resize(index);
    all_.push_back(input);
  }
  // One for each of `records`, or none at all.
  std::span<const kernels::FragmentedInput> Of(size_t records) {
    if (!all_.empty()) all_.resize(records);
    return all_;
  }

 private:
  std::vector<kernels::FragmentedInput> all_;
};

// Attention records in one form, with the lengths and windows that their plan needs.
struct FormRecords {
  std::vector<kernels::SegmentRecord> records;
  std::vector<PlanSegment> lengths;            // by record
  FragmentsByRecord fragments;                 // of queries
  std::vector<kernels::WindowRecord> windows;  // by record, if there is a window
  void Reserve(int32_t most);
  void Clear();
};

// Records of a projection.
struct ProjectionRecords {
  std::vector<kernels::ProjectionRecord> records;
  FragmentsByRecord fragments;  // of inputs
  void Reserve(int32_t most);
  void Clear();
};

struct BatchLaunch {
  // Takes memory for any launch within the limits; once, for a configured backend.
  absl::Status Create(const Limits& limits, kernels::AttentionBackend& backend, int32_t index);
  // Empties everything but the batch, the records and `launch`, of which the launcher sets every
  // field.
  void Clear();
  void ClearRecords();

  int32_t slot = -1;
  Batch batch;
  LaunchReport report;
  kernels::Launch launch;  // refers to what follows; valid until the slot is waited for
  kernels::LaunchLayout layout;
  std::vector<kernels::TableRange> tables;  // entries of page tables that changed
  std::vector<kernels::AppendRecord> appends;
  std::vector<kernels::SelectRecord> selects;
  FormRecords absorbed, expanded;
  ProjectionRecords absorbs, projects;
  RecordsOrigin origin;  // of the present records
  // Log-sum-exps of the rows computed, by position in batch.requests: the client's memory, or
  // `unwanted_lse` for requests that ask for none.
  struct LseRows {
    const float* at = nullptr;  // null: nothing was computed
    int64_t row_stride = 0;     // floats
  };
  std::vector<LseRows> lse;
  std::unique_ptr<kernels::HostBuffer> unwanted_lse;  // [launch_packed_rows]
  int64_t unwanted_used = 0;                          // floats of it, from its start
  int64_t unwanted_left = 0;                          // floats that are not taken from its end
  float* unwanted_staged = nullptr;                   // its address in the launch
  // By position in batch.requests; points into `compared`, or is null unless the request is a
  // repeat. Has a 1 for each launched row that differs from the stored one, else 0; index keys or
  // entries follow the KV rows. Empty without repeats.
  std::vector<const int32_t*> differs;
  std::unique_ptr<kernels::HostBuffer> compared;  // [2, launch_rows]
  std::vector<kernels::WordValue> signals;        // of requests that end with this launch
  bool late = false;                              // once it has been waited for
  // Time in its gate, known once it has been waited for.
  int64_t waited_ns = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_BATCH_LAUNCH_H_
