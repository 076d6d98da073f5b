// The kernels with which a launch waits for a word of host memory and sets others (gate.h).
#ifndef MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_

#include <span>

#include "absl/status/status.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/slot/launch_slot.h"
#include "kernels/types/launch.h"

namespace mla::kernels::hip {

// Borrows the device's state. Threading: as LaunchBuilder.
class GateWork final {
 public:
  explicit GateWork(const DeviceState& device) : device_(device) {}

  // The first of the timed kernels. INVALID_ARGUMENT: the device does not reach the word, the
  // limit is none (kMostGateNs), or what does not look at the gate's outcome would write shared
  // memory.
  absl::Status AddGate(LaunchSlot& slot, const Launch& launch);
  // The last of the timed kernels, where they bring all outputs where they belong or there is a
  // gate; and the last of all, where kernels bring outputs there. Sets no signal where copies do.
  absl::Status AddTimedSignals(LaunchSlot& slot, std::span<const WordValue> signals);
  absl::Status AddSignalsBehindMoves(LaunchSlot& slot, std::span<const WordValue> signals);

 private:
  absl::Status AddSignals(LaunchSlot& slot, std::span<const WordValue> signals);

  const DeviceState& device_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_
