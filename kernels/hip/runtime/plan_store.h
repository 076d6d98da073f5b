// Device copies of plans, kept by generation. The layers of a step share a plan, so it is uploaded
// once a step, not once a layer.
//
// Launch slots hold the copies that they run with; a copy is replaced only when no slot holds it.
// Among these, the least recently used copy is replaced first. Uploads are enqueued on the stream
// of the launch's inputs, before the inputs, so any work that waits for the inputs has the plan as
// well.
//
// Threading: as AttentionBackend demands. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_RUNTIME_PLAN_STORE_H_
#define MLA_KERNELS_HIP_RUNTIME_PLAN_STORE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/types/attention_params.h"

namespace mla::kernels::hip {

// Device addresses of a plan's arrays. Plans with rounds have no work items on the device, and
// lists of merges only if the rounds leave merging to combine.
struct DevicePlan {
  const int32_t* work_indptr = nullptr;
  const WorkInfo* work_info = nullptr;
  const int32_t* reduce_indptr = nullptr;
  const ReduceTile* reduce_final_map = nullptr;
  const int32_t* reduce_partial_map = nullptr;
  const Expansion* expansions = nullptr;
  const ExpandedItem* items = nullptr;
  const int32_t* unit_indptr = nullptr;
};

class PlanStore final {
 public:
  // Makes room for `copies` plans of at most `bytes` each. A launch may hold two (one a form), and
  // some must remain to be replaced: copies > 2 x launch slots.
  static absl::StatusOr<std::unique_ptr<PlanStore>> Create(GpuRuntime* runtime, int32_t copies,
                                                           int64_t bytes);

  // Returns the device copy of the plan, held for `slot` until Release. Uploads it on `stream` if
  // needed; the kernels of the launch must wait for that stream. RESOURCE_EXHAUSTED if it does not
  // fit, or all copies are held. A plan of generation 0 is uploaded each time.
  absl::StatusOr<DevicePlan> Get(const PlanView& plan, int32_t slot, Stream stream);
  // Call when the slot's launch has ended, or was refused and no part of it runs.
  void Release(int32_t slot);

  int64_t uploads() const { return uploads_; }

 private:
  struct Entry {
    StagedRegion region;
    uint64_t generation = 0;  // 0: holds no plan
    uint64_t held = 0;        // bit s: held by launch slot s
    uint64_t last_used = 0;
    DevicePlan plan;
  };

  explicit PlanStore(GpuRuntime* runtime) : runtime_(runtime) {}
  Entry* Find(uint64_t generation);
  Entry* OldestFree();
  absl::Status Upload(const PlanView& plan, Entry& entry, Stream stream);

  GpuRuntime* const runtime_;
  std::vector<Entry> entries_;
  uint64_t uses_ = 0;
  int64_t uploads_ = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_PLAN_STORE_H_
