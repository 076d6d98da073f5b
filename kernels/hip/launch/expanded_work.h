// The expanded form in a launch: rounds of up-projection and attention
// (kernels/types/round_info.h), then the merge.
//
// Ownership: borrows the device's state. Threading: as the backend's launches, one thread at a
// time.
#ifndef MLA_KERNELS_HIP_LAUNCH_EXPANDED_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_EXPANDED_WORK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_recording.h"

namespace mla::kernels::hip {

class ExpandedWork final {
 public:
  explicit ExpandedWork(const DeviceState& device) : device_(device) {}

  // Returns the number of query rows from which this form is faster than the absorbed one;
  // launch_rows + 1 if it never is.
  static int32_t MinRows(const Geometry& geometry, int32_t launch_rows);
  // Returns the number of bytes of the workspace for up-projected keys and values under these
  // limits: at most `limit`, but no less than one head needs; 0 without weights.
  static int64_t WorkspaceBytes(const ArchTraits& arch, const BackendLimits& limits, int64_t limit);

  // Returns FAILED_PRECONDITION if the launch lacks weights, rounds or a workspace.
  absl::Status Check(const AttentionParams& params) const;
  // REQUIRES: Check is OK.
  absl::Status Add(LaunchRecording& recording, const AttentionParams& params,
                   const DevicePlan& plan) const;

 private:
  // The kernels of a round: up-projection, as an index in ArchTraits::expand, and attention.
  struct RoundKernels {
    size_t expand = 0;
    Function attend = nullptr;
    LaunchShape shape;  // shape of attention
  };
  RoundKernels KernelsOf(const AttentionDesc& desc, int32_t units) const;
  absl::Status AddRound(LaunchRecording& recording, const Round& round, const RoundKernels& kernels,
                        const ExpandArgs& expand, const ExpandedArgs& attend) const;

  const DeviceState& device_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_EXPANDED_WORK_H_
