// What the kernels of an architecture compute, as AttentionBackend tells its caller.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/types/attention_desc.h"

namespace mla::kernels::hip {

// All but memory_bytes and fp8_prefill_keys, which are known later.
BackendInfo InfoOf(const GpuRuntime& runtime, const ArchTraits& arch);

// Sets the fields that follow from whether kernels reach the host's memory.
void SetHostMemory(const GpuRuntime& runtime, const ArchTraits& arch, BackendInfo* info);

// UNIMPLEMENTED with what is missing for `desc`.
absl::Status CheckSupported(const ArchTraits& arch, const BackendInfo& info,
                            const AttentionDesc& desc);

// How plans for `desc` are cut on a device of `units` units; `rounds` but for cache_bytes is the
// caller's.
PlanTraits PlanTraitsOf(const ArchTraits& arch, int32_t units, const AttentionDesc& desc);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_CAPABILITIES_H_
