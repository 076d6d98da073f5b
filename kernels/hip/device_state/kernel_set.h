// The kernels of one device image, found by their names.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_

#include <vector>

#include "absl/status/status.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// Null: the architecture has no such kernel.
struct KernelSet {
  Function move = nullptr, digest = nullptr, copy_tensors = nullptr, append = nullptr,
           combine = nullptr;
  Function gate = nullptr, signal = nullptr;
  Function index_logits = nullptr, index_select = nullptr, widen = nullptr;
  Function project = nullptr, project_row_wide = nullptr, project_row_deep = nullptr;
  std::vector<Function> attend, split, stream, expand, expanded;  // as those of ArchTraits
};

// Finds all kernels but those of FindPrefillKernels, loads their code, and lets them take the
// shared memory they need. An error of the runtime where the image lacks one.
absl::Status FindKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                         KernelSet* kernels);

// The expanded form's kernels with products of 8 bits, after FindKernels. UNIMPLEMENTED: none are
// written for this architecture; an error of the runtime where the image has none.
absl::Status FindPrefillKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                                KernelSet* kernels);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_
