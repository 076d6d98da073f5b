// Holds a device, and the state that all parts of its launches share: kernels, weights and device
// memory.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_DEVICE_STATE_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_DEVICE_STATE_H_

#include <cstdint>

#include "kernels/attention_backend.h"
#include "kernels/formats/kv_format.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/device_state/kernel_set.h"
#include "kernels/hip/device_state/weight_store.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

inline constexpr uint32_t kBlockThreads = 256;  // for every kernel except attention

// Returns the number of blocks needed for `all` if each takes `share`.
inline uint32_t BlocksFor(int64_t all, int64_t share) {
  return static_cast<uint32_t>((all + share - 1) / share);
}

struct DeviceState {
  GpuRuntime* runtime = nullptr;
  const ArchTraits* arch = nullptr;
  BackendInfo info;
  KernelSet kernels;
  bool brings_boxes = false;  // the driver makes tensor maps of KV rows (BoxArgs)

  WeightStore weights;
  DeviceBuffer pool, table_mirror;
  // The partial rows of the plan, followed by the rows that the expanded form carries between
  // rounds.
  DeviceBuffer partial_o, partial_lse;
  DeviceBuffer meetings;            // SplitArgs::meetings
  DeviceBuffer expanded_workspace;  // up-projected keys and values; unused between launches

  // Returns the scale that kernels use for the rows of a layer (kernel_args.h), given the host's
  // `scale`.
  float RowScale(KvFormat format, float scale) const {
    if (TraitsOf(format).scales != KvScales::kLayer) return 1.0f;
    return arch->fp8 == Fp8Kind::kE4m3Fn ? scale : ScaleToKind(scale, arch->fp8);
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_DEVICE_STATE_H_
