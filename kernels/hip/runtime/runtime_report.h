// Says which GPUs this binary can use with the runtimes of this machine, before a server starts.
#ifndef MLA_KERNELS_HIP_RUNTIME_RUNTIME_REPORT_H_
#define MLA_KERNELS_HIP_RUNTIME_RUNTIME_REPORT_H_

#include <span>
#include <string>
#include <vector>

#include "kernels/hip/runtime/kernel_images.h"
#include "kernels/hip/runtime/runtime_library.h"

namespace mla::kernels::hip {

// Returns a line on the runtime and one on each device that it lists. The first line names the
// architectures that the runtime can drive, and the others with the reason why it cannot. An
// architecture can be driven if the runtime knows it and `images` have its code. `libraries` as for
// GpuRuntime::Open. Nothing is started on a device.
std::vector<std::string> DescribeRuntime(Vendor vendor, std::span<const std::string> libraries,
                                         std::span<const KernelImage> images);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_RUNTIME_REPORT_H_
