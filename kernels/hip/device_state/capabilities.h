// Describes the features of an architecture's kernels in the terms of AttentionBackend.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/types/attention_desc.h"

namespace mla::kernels::hip {

// Returns all fields except memory_bytes and fp8_prefill_keys, which become known later.
BackendInfo InfoOf(const GpuRuntime& runtime, const ArchTraits& arch);

// Sets the fields that depend on whether kernels reach host memory.
void SetHostMemory(const GpuRuntime& runtime, const ArchTraits& arch, BackendInfo* info);

// Returns UNIMPLEMENTED, with what is missing for `desc`, or OK.
absl::Status CheckSupported(const ArchTraits& arch, const BackendInfo& info,
                            const AttentionDesc& desc);

// Returns how plans for `desc` are cut on a device of `units` units. The caller fills in `rounds`,
// except cache_bytes.
PlanTraits PlanTraitsOf(const ArchTraits& arch, int32_t units, const AttentionDesc& desc);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_
