// Turns a Launch into the kernels and metadata of a launch slot.
//
// Ownership: borrows the device's state; owns the device copies of plans, the workspaces between
// kernels, and scratch memory. Threading: as the backend's launches, one thread at a time. Nothing
// is allocated after Create.
#ifndef MLA_KERNELS_HIP_LAUNCH_LAUNCH_BUILDER_H_
#define MLA_KERNELS_HIP_LAUNCH_LAUNCH_BUILDER_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/launch/absorbed_work.h"
#include "kernels/hip/launch/expanded_work.h"
#include "kernels/hip/launch/gate_work.h"
#include "kernels/hip/launch/index_work.h"
#include "kernels/hip/launch/page_work.h"
#include "kernels/hip/launch/project_work.h"
#include "kernels/hip/launch/stream_work.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_slot.h"

namespace mla::kernels::hip {

class LaunchBuilder final {
 public:
  // `device` outlives the builder and has its memory already. Clears workspaces on `stream`.
  static absl::StatusOr<std::unique_ptr<LaunchBuilder>> Create(const DeviceState& device,
                                                               const BackendLimits& limits,
                                                               Stream stream);

  // Most bytes of one launch's metadata.
  static int64_t MetadataBytes(const BackendLimits& limits, const BackendInfo& info);
  // Memory that Create takes, on the device and in pinned host memory.
  static int64_t WorkspaceBytes(const DeviceState& device, const BackendLimits& limits);
  static int64_t HostBytes(const DeviceState& device, const BackendLimits& limits);

  // Returns the launch to give to Begin, Build and Submit of the slot in place of `launch`
  // (StreamWork::Take). Call it before slot.Begin; slot.Abandon or slot.Submit must follow.
  const Launch& Take(LaunchSlot& slot, int32_t index, const Launch& launch) {
    return streams_->Take(slot, index, launch);
  }
  // Call between slot.Begin and slot.Submit or Abandon. `index` is the slot's; the builder holds
  // the launch's plans under it until Release. INVALID_ARGUMENT, FAILED_PRECONDITION or
  // UNIMPLEMENTED for launches that the device does not run, RESOURCE_EXHAUSTED beyond the limits.
  absl::Status Build(LaunchSlot& slot, int32_t index, const Launch& launch);
  // Call when the slot's launch has ended, or was refused and no part of it runs.
  void Release(int32_t index) { plans_->Release(index); }

 private:
  LaunchBuilder(const DeviceState& device, const BackendLimits& limits);
  absl::Status AddAttention(LaunchSlot& slot, int32_t index, const AttentionParams& params);
  absl::Status CheckAttention(const AttentionParams& params) const;

  const DeviceState& device_;
  const BackendLimits limits_;
  GateWork gate_;
  PageWork pages_;
  IndexWork index_;
  ProjectWork projections_;
  AbsorbedWork absorbed_;
  ExpandedWork expanded_;
  std::optional<StreamWork> streams_;
  std::unique_ptr<PlanStore> plans_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_LAUNCH_BUILDER_H_
