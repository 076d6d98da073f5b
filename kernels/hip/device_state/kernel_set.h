// Finds the kernels of one device image by their names.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_

#include <vector>

#include "absl/status/status.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// A member is null if the architecture has no such kernel.
struct KernelSet {
  Function move = nullptr, digest = nullptr, copy_tensors = nullptr, append = nullptr,
           combine = nullptr;
  Function gate = nullptr, signal = nullptr;
  Function index_logits = nullptr, index_select = nullptr, widen = nullptr;
  Function project = nullptr, project_row_wide = nullptr, project_row_deep = nullptr;
  Function pack_rows = nullptr, few_rows = nullptr, many_rows = nullptr, finish_rows = nullptr;
  Function few_code_rows = nullptr, many_code_rows = nullptr;
  std::vector<Function> attend, split, boxes, stream, expand,
      expanded;  // by index, as in ArchTraits
};

// Finds all kernels except those for FindPrefillKernels, loads their code, and raises their limit
// of shared memory. Returns the runtime's error if the image lacks one.
absl::Status FindKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                         KernelSet* kernels);

// Finds the expanded form's kernels with 8-bit products; call it after FindKernels. UNIMPLEMENTED
// if none are written for this architecture; the runtime's error if the image lacks one.
absl::Status FindPrefillKernels(GpuRuntime& runtime, Module module, const ArchTraits& arch,
                                KernelSet* kernels);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_KERNEL_SET_H_
