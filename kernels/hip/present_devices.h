// Finds the GPUs that this machine has, whether or not a runtime can use them. Only the kernel is
// asked, so that a server that computes on CPUs can report GPUs that it does not use.
#ifndef MLA_KERNELS_HIP_PRESENT_DEVICES_H_
#define MLA_KERNELS_HIP_PRESENT_DEVICES_H_

#include <string>

#include "kernels/hip/runtime/runtime_library.h"

namespace mla::kernels::hip {

// Returns text like "8 AMD GPUs (gfx942); /dev/kfd cannot be opened: Permission denied (it is of
// group 109)". The second half says what keeps this process from them, as far as can be seen. Empty
// if there is no GPU that kernels exist for. A container sees the GPUs that its runtime lets it
// use. `root`: where the machine's files are, for tests.
std::string PresentDevices(Vendor vendor, const std::string& root = "");

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_PRESENT_DEVICES_H_
