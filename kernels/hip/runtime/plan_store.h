// Device copies of plans, kept by generation: the layers of a step share a plan, so it travels once
// a step and not once a layer.
//
// A copy is held by the launch slots that run with it and replaced only when none does; of those
// that none holds, the one used longest ago goes first. Uploads are enqueued on the stream of the
// launch's inputs, before these, so whatever waits for those has the plan as well.
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

// Where the arrays of a plan lie on the device. Plans with rounds have no work items there, and
// what is to be merged only where the rounds leave it.
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
  // `copies` of at most `bytes` each. A launch may hold two (one a form), and enough must be left
  // to replace: copies > 2 x launch slots.
  static absl::StatusOr<std::unique_ptr<PlanStore>> Create(GpuRuntime* runtime, int32_t copies,
                                                           int64_t bytes);

  // The device copy of the plan, held for `slot` until Release; uploads it unless it is there,
  // on `stream`, whose work the kernels of the launch will wait for. RESOURCE_EXHAUSTED when it
  // does not fit, or all copies are held. A plan of generation 0 is uploaded each time.
  absl::StatusOr<DevicePlan> Get(const PlanView& plan, int32_t slot, Stream stream);
  // The slot's launch has ended, or was refused and nothing of it runs.
  void Release(int32_t slot);

  int64_t uploads() const { return uploads_; }

 private:
  struct Entry {
    StagedRegion region;
    uint64_t generation = 0;  // 0: holds no plan
    uint64_t held = 0;        // bit s: by launch slot s
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
