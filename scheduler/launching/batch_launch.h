// Holds a batch and the launch that it becomes, in one slot of the backend. Holds the records that
// the launch refers to and the memory that its requests share. All memory is taken at the start.
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
#include "scheduler/engine_types.h"
#include "scheduler/limits.h"
#include "scheduler/planning/planner.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

// Finds fragmented inputs by the index of their record. Launches have few, and most none.
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
  // Returns one input for each of `records`; empty if no record has a fragmented input.
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

// Remembers which rows the records of a launch are for, regardless of the layer. The layers of a
// step come one after another as launches of the same rows. Their records differ in few fields, so
// RecordBuilder::Update sets only those.
class RecordsOrigin {
 public:
  // Call it when the records of `batch` have been built, with the version of the cache at that time
  // (KvCache::version).
  void Note(const Batch& batch, uint64_t cache_version);
  void Forget() { cache_version_ = 0; }
  // Returns true if there are records of the same rows and the cache has not changed since.
  bool Matches(const Batch& batch, uint64_t cache_version) const;

 private:
  // Everything that the records depend on, except the layer and the addresses of its tensors.
  struct Rows {
    // The open step; if another step used the same address, the version of the cache would have
    // changed.
    const Step* step = nullptr;
    int32_t first = 0, count = 0;
    int32_t head_offset = 0, num_heads = 0;
    int32_t expanded_min_rows = 0;
    Profile profile = Profile::kAbsorbed;
    kernels::DType q_dtype = kernels::DType::kBf16;
    bool has_kv = false;
    friend bool operator==(const Rows&, const Rows&) = default;
  };
  static Rows RowsOf(const StreamRequest& request);

  uint64_t cache_version_ = 0;  // 0: no records
  BatchKey key_;
  Rows rows_;
};

struct BatchLaunch {
  // Takes the memory for any launch within the limits. It is called once, when the backend is
  // configured.
  absl::Status Create(const Limits& limits, kernels::AttentionBackend& backend, int32_t index);
  // Empties everything except the batch, the records, and `launch`, in which the launcher sets
  // every field.
  void Clear();
  void ClearRecords();

  int32_t slot = -1;
  Batch batch;
  LaunchReport report;
  kernels::Launch launch;  // refers to the members below; valid until the slot has been waited for
  kernels::LaunchLayout layout;
  // The changed entries of page tables, which the launch publishes.
  std::vector<kernels::TableRange> tables;
  std::vector<kernels::AppendRecord> appends;
  std::vector<kernels::SelectRecord> selects;
  FormRecords absorbed, expanded;
  ProjectionRecords absorbs, projects;
  std::vector<kernels::RowProjectionRecord> queries, hiddens;  // ordered by their weights
  RecordsOrigin origin;                                        // of the present records
  // Log-sum-exps of the computed rows, by position in batch.requests. They are in the client's
  // memory, or in `unwanted_lse` for requests that do not ask for them.
  struct LseRows {
    const float* at = nullptr;  // null: nothing was computed
    int64_t row_stride = 0;     // floats
  };
  std::vector<LseRows> lse;
  std::unique_ptr<kernels::HostBuffer> unwanted_lse;  // [launch_packed_rows]
  int64_t unwanted_used = 0;                          // floats taken from its start
  int64_t unwanted_left = 0;                          // floats not yet taken from its end
  float* unwanted_staged = nullptr;                   // its address in the launch
  // By position in batch.requests; points into `compared`, or is null unless the request is a
  // repeat. Has a 1 for each launched row that differs from the stored one, else 0; index keys or
  // entries follow the KV rows. Empty without repeats.
  std::vector<const int32_t*> differs;
  std::unique_ptr<kernels::HostBuffer> compared;  // [2, launch_rows]
  // The words to set for the requests that end with this launch.
  std::vector<kernels::WordValue> signals;
  // Words for which the launch waits, one for each request whose tensors have not come.
  std::vector<kernels::WordValue> gates;
  bool late = false;  // valid once the launch has been waited for
  // Time in its gate, known once it has been waited for.
  int64_t waited_ns = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_BATCH_LAUNCH_H_
