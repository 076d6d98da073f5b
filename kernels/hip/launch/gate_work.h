// Adds the kernels with which a launch waits for words of host memory and sets others (gate.h).
#ifndef MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_

#include <span>

#include "absl/status/status.h"
#include "kernels/hip/args/gate_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/types/launch.h"

namespace mla::kernels::hip {

// Borrows the device's state. Threading: as LaunchBuilder.
class GateWork final {
 public:
  explicit GateWork(const DeviceState& device) : device_(device) {}

  // Adds the gate as the first of the timed kernels. INVALID_ARGUMENT if the device does not reach
  // a word, if there are more than kMostGateWords, if the limit is not in bounds (kMostGateNs), or
  // if a kernel that does not read the gate's outcome would write shared memory.
  absl::Status AddGate(LaunchRecording& recording, const Launch& launch);
  // AddTimedSignals adds the last of the timed kernels, if the kernels store all outputs in place
  // or there is a gate. AddSignalsBehindMoves adds the last kernel of all, if kernels copy the
  // outputs. Neither sets a signal if copy commands move outputs.
  absl::Status AddTimedSignals(LaunchRecording& recording, std::span<const WordValue> signals);
  absl::Status AddSignalsBehindMoves(LaunchRecording& recording,
                                     std::span<const WordValue> signals);

 private:
  bool AddWord(LaunchRecording& recording, const WordValue& ready, GateArgs* args) const;
  absl::Status AddSignals(LaunchRecording& recording, std::span<const WordValue> signals);

  const DeviceState& device_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_GATE_WORK_H_
