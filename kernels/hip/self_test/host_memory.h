// A probe: kernels of an AMD device reach pinned memory of the host at the host's own addresses.
#ifndef MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_
#define MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_

#include "absl/status/status.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// OK: the runtime has memory that it pinned, and memory that was registered with it, at the host's
// addresses, and a kernel has read both and written both. Else the reason, and nothing of the host
// was touched: a kernel that reads an address that is not mapped ends the process.
absl::Status ProbeHostMemory(const DeviceState& device, Stream stream);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SELF_TEST_HOST_MEMORY_H_
