// Turns a Launch into kernels and metadata: a LaunchRecording.
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
#include "kernels/hip/launch/row_work.h"
#include "kernels/hip/launch/stream_work.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_recording.h"

namespace mla::kernels::hip {

// Selects how the latent rows of a launch are attended: by kernels of attention and merge, by one
// kernel that does both (AbsorbedWork::AddSplit), or while queries arrive (StreamWork).
enum class AbsorbedForm : uint8_t { kPlain, kSplit, kStreamed };

// What LaunchBuilder has decided about a launch.
struct LaunchForm {
  AbsorbedForm absorbed = AbsorbedForm::kPlain;
  AbsorbedWork::Split split = {};  // of kSplit
  LaunchTensors tensors;           // what the slot copies
};

class LaunchBuilder final {
 public:
  // `device` outlives the builder and has its memory already. Clears workspaces on `stream`.
  static absl::StatusOr<std::unique_ptr<LaunchBuilder>> Create(const DeviceState& device,
                                                               const BackendLimits& limits,
                                                               Stream stream);

  // Returns the most bytes of one launch's metadata.
  static int64_t MetadataBytes(const BackendLimits& limits, const BackendInfo& info);
  // Return the bytes that Create takes, on the device and in pinned host memory.
  static int64_t WorkspaceBytes(const DeviceState& device, const BackendLimits& limits);
  static int64_t HostBytes(const DeviceState& device, const BackendLimits& limits);

  // Decides how the launch of slot `index` is computed. INVALID_ARGUMENT, FAILED_PRECONDITION or
  // UNIMPLEMENTED for attention that the device does not run. Call it before recording.Begin; the
  // slot's Abandon or Submit must follow.
  absl::StatusOr<LaunchForm> Choose(LaunchRecording& recording, int32_t index,
                                    const Launch& launch);
  // Adds the kernels of a launch after recording.Begin; the builder holds the launch's plans under
  // `index` until Release. Returns the errors of Choose, and RESOURCE_EXHAUSTED beyond the limits.
  absl::Status Build(LaunchRecording& recording, int32_t index, const Launch& launch,
                     const LaunchForm& form);
  // Call when the slot's launch has ended, or was refused and no part of it runs.
  void Release(int32_t index) { plans_->Release(index); }

 private:
  LaunchBuilder(const DeviceState& device, const BackendLimits& limits);
  absl::Status AddAttention(LaunchRecording& recording, int32_t index,
                            const AttentionParams& params, const LaunchForm& form);
  absl::Status CheckAttention(const AttentionParams& params) const;

  const DeviceState& device_;
  const BackendLimits limits_;
  GateWork gate_;
  PageWork pages_;
  IndexWork index_;
  ProjectWork projections_;
  RowWork row_products_;
  AbsorbedWork absorbed_;
  ExpandedWork expanded_;
  std::optional<StreamWork> streams_;
  std::unique_ptr<PlanStore> plans_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_LAUNCH_BUILDER_H_
