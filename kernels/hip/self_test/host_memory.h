// Probes whether kernels of an AMD device reach pinned host memory at the host's own addresses.
#ifndef MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_
#define MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_

#include "absl/status/status.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// Returns OK if the runtime maps both memory that it pinned and memory that was registered with it
// at the host's addresses, and a kernel has read and written both. Otherwise returns the reason
// without touching host memory, because a kernel that reads an unmapped address ends the process.
absl::Status ProbeHostMemory(const DeviceState& device, Stream stream);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_
