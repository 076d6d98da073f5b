// Makes memory and events that a device shares with other processes of the host.
//
// Memory comes from the virtual memory calls and is exported as a POSIX descriptor. If the runtime
// lacks these calls or refuses, it is an ordinary allocation with an interprocess handle. Before
// ROCm 7.1 the handle is tried first. Both vendors have the same calls under names of their own,
// with the same structs and values.
//
// Threading: any thread. Memory is made and freed in milliseconds.
#ifndef MLA_KERNELS_HIP_RUNTIME_DEVICE_SHARING_H_
#define MLA_KERNELS_HIP_RUNTIME_DEVICE_SHARING_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/shared_device_memory.h"

namespace mla::kernels::hip {

struct SharingTable;

class DeviceSharing final {
 public:
  // `runtime` outlives it. UNAVAILABLE names an entry point that the library lacks.
  static absl::StatusOr<std::unique_ptr<DeviceSharing>> Open(GpuRuntime* runtime);
  ~DeviceSharing();

  // Allocates at least `bytes` zeroed bytes and `events` events. Launches may name addresses inside
  // the memory while it is listed in `ranges`, from now until its destructor, which waits for them
  // for at most `most`. RESOURCE_EXHAUSTED if the device has no room.
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> Allocate(int64_t bytes, int32_t events,
                                                               std::shared_ptr<PinnedRanges> ranges,
                                                               std::chrono::milliseconds most);

 private:
  friend class SharedMemoryOfDevice;
  DeviceSharing(GpuRuntime* runtime, std::unique_ptr<SharingTable> table);
  absl::Status Check(int code, const char* call) const { return runtime_->Check(code, call); }

  GpuRuntime* const runtime_;
  const std::unique_ptr<SharingTable> api_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_DEVICE_SHARING_H_
