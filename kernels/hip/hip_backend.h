// AttentionBackend on a GPU: device code objects from device_code.hip, loaded through a runtime
// that is opened at run time (gpu_runtime.h). The same class serves AMD (gfx950, gfx942) and NVIDIA
// (sm_90) devices; they differ in the image that is loaded and in tile sizes.
//
// Memory: device memory holds one pool, a mirror of the page tables, partial buffers and weights.
// Every launch slot has a region of pinned and one of device memory for each of metadata, inputs,
// outputs and workspace. Configure takes all of it; nothing is allocated later. The first heads of
// a model's weights reserve room for all its heads (weight_arena.h), so an upload that has begun
// does not run out of room.
//
// Copies run on streams of their own (launch_slot.h), so that copies of one launch overlap with
// kernels of another. Kernels of all launches share the compute stream and therefore run in
// submission order. Only Wait waits for the device.
//
// Healthy() becomes an error for good, with the API's text, after a device fault, after a launch
// that outlives the watchdog, or if LoadWeights fails while it moves other models' weights. Every
// later LoadWeights, Submit and Wait returns that error. If nothing had to move, a failed
// LoadWeights may be called again.
//
// Threading: as AttentionBackend demands.
#ifndef MLA_KERNELS_HIP_HIP_BACKEND_H_
#define MLA_KERNELS_HIP_HIP_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "kernels/backend_registry.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/launch/launch_builder.h"
#include "kernels/hip/runtime/call_watch.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/device_sharing.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/hip/runtime/kernel_images.h"
#include "kernels/hip/self_test/self_test.h"
#include "kernels/hip/slot/launch_slot.h"

namespace mla::kernels::hip {

// A driver call waits for other threads' calls, and a call that pins memory may take seconds.
inline constexpr int64_t kLeastStuckMs = 30000;
// Use of graphs for kernels of launches that repeat (runtime/kernel_graphs.h). A test at start
// turns them off if it finds a fault. kAuto: on NVIDIA devices.
enum class GraphUse { kAuto, kOn, kOff };

struct HipBackendOptions {
  Vendor vendor = Vendor::kAmd;
  int32_t device = 0;
  std::vector<std::string> libraries;  // empty: RuntimeLibraries
  std::vector<KernelImage> images;     // empty: BuiltInKernelImages
  double memory_fraction = 0.9;        // share of the device's free memory to take
  bool self_test = true;               // known-answer test of every kernel before use
  SelfTestOptions self_test_options;
  GraphUse graphs = GraphUse::kAuto;
  bool reach_host = true;  // false: tensors are copied even if kernels reach host memory
  // At most this number of bytes of device memory is taken for up-projected keys and values of the
  // expanded form. Launches that need more process it in rounds (kernels/types/round_info.h).
  int64_t expanded_workspace_bytes = int64_t{640} << 20;
  int32_t most_rounds = kMostRounds;  // a launch; fewer only in tests
  int64_t shared_bytes = 0;           // part of that memory left to AllocateShared
  int64_t watchdog_ms = 10000;        // longest wait for one launch
  // A call that has lasted this long counts as stuck (StuckCall). 0: twice watchdog_ms, but at
  // least kLeastStuckMs.
  int64_t stuck_ms = 0;
};

class HipBackend final : public AttentionBackend {
 public:
  // Makes a backend; UNAVAILABLE if there is no runtime or no device. FAILED_PRECONDITION if no
  // image for this architecture was built in, or the runtime is too old. INTERNAL if a kernel
  // failed its self-test, the test took too long, or the device failed.
  static absl::StatusOr<std::unique_ptr<HipBackend>> Create(const HipBackendOptions& options);
  ~HipBackend() override;

  const BackendInfo& Info() const override { return device_.info; }
  absl::Status CanRun(const AttentionDesc& desc) const override;
  PlanTraits Traits(const AttentionDesc& desc) const override;
  int32_t ExpandedFormMinRows(const Geometry& geometry) const override;
  int64_t WorkspaceSize(const BackendLimits& limits) const override;
  int64_t HostWorkspaceSize(const BackendLimits& limits) const override;
  absl::Status Configure(const BackendLimits& limits) override;
  absl::Status Healthy() const override { return health_; }
  std::string StuckCall() const override;
  HostWork Work() const override;

  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(size_t bytes) override;
  // Any thread. Pins the memory in place. After an error, launches copy this memory through the
  // pinned staging memory, like any other. Unregistering waits until Wait has returned for the
  // launches whose copies reach this memory. A lost device never ends its copies, so the pages then
  // stay pinned until the process ends.
  absl::Status RegisterHost(std::span<std::byte> memory) override;
  void UnregisterHost(std::span<std::byte> memory) override;
  // Returns true for pinned memory on devices whose kernels reach it, if it is aligned.
  bool InPlace(const void* host, int64_t bytes) const override;
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(int64_t bytes,
                                                                     int32_t events) override;
  absl::Status ReadShared(void* to, const void* from, int64_t bytes) override;
  absl::Status WriteShared(void* to, const void* from, int64_t bytes) override;
  absl::Status LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                           int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) override;
  absl::Status ReadWeights(int32_t slot, const Geometry& geometry, int32_t head, Bf16* w_uk,
                           Bf16* w_uv) override;
  absl::Status ReadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, void* weights) override;
  absl::Status LoadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, const void* weights) override;
  absl::Status FreeWeights(int32_t slot) override;

  SlotMemory Memory(int32_t slot) override;
  absl::Status Submit(int32_t slot, const Launch& launch) override;
  bool Done(int32_t slot) override;
  absl::StatusOr<int64_t> Wait(int32_t slot) override;
  bool WasLate(int32_t slot) const override {
    return CheckSlot(slot).ok() && slots_[static_cast<size_t>(slot)]->submitted().was_late();
  }
  bool Signalled(int32_t slot) const override {
    return CheckSlot(slot).ok() && slots_[static_cast<size_t>(slot)]->recording().signals();
  }
  int64_t GateNanos(int32_t slot) const override {
    return CheckSlot(slot).ok() ? slots_[static_cast<size_t>(slot)]->submitted().waited_ns() : 0;
  }

  // Returns the pool's device address, for tools that fill it directly.
  DevicePtr pool() const { return device_.pool.at(); }
  GpuRuntime& runtime() { return *runtime_; }
  Stream compute_stream() const { return streams_.compute; }

 private:
  HipBackend(const HipBackendOptions& options, std::unique_ptr<GpuRuntime> runtime,
             const ArchTraits& arch);
  absl::Status LoadKernels(std::span<const std::byte> image);
  // Runs the self-test of all kernels. `prefill` holds what kept the kernels of FindPrefillKernels
  // from being used; it becomes an error if only those kernels fail.
  absl::Status TestKernels(absl::Status* prefill, SelfTestRun& run);
  // Finds out whether kernels reach host memory, and stores the result.
  absl::Status SettleHostMemory(SelfTestRun& run);
  void ReachHost(bool reach);
  // Finds out whether the driver makes the tensor maps that copies of boxes need, and stores the
  // result.
  absl::Status SettleBoxes();
  // Finds out whether graphs are used, and stores the result.
  absl::Status SettleGraphs(SelfTestRun& run);
  absl::Status CheckReached(std::span<std::byte> memory);
  absl::Status CreateStreams();
  absl::Status Allocate(const BackendLimits& limits);
  void Release();
  absl::Status AwaitShared(absl::Status copied, int64_t bytes);
  absl::Status CheckSlot(int32_t slot) const;
  absl::Status Fault(absl::Status status);
  // Returns the bytes of pinned host memory of one launch slot, which takes as many on the device.
  int64_t StagedBytes(const BackendLimits& limits) const;
  int64_t ExpandedWorkspaceBytes(const BackendLimits& limits) const;

  HipBackendOptions options_;
  std::unique_ptr<GpuRuntime> runtime_;
  std::unique_ptr<DeviceSharing> sharing_;  // null: the library lacks its calls
  int64_t free_bytes_ = 0;                  // on the device when the backend was made
  absl::Status health_;
  HostWork shared_work_;           // work of ReadShared and WriteShared
  std::atomic<bool> lost_{false};  // health_ is an error, for other threads
  CallWatch calls_;                // calls that one thread at a time makes
  Module module_ = nullptr;
  Streams streams_;
  DeviceState device_;

  BackendLimits limits_;
  bool configured_ = false;
  std::unique_ptr<LaunchBuilder> builder_;
  std::vector<std::unique_ptr<LaunchSlot>> slots_;
  // Shared with the buffers handed out, which may outlive a launch but not the backend.
  std::shared_ptr<PinnedRanges> pinned_ = std::make_shared<PinnedRanges>();
};

// Adds the rows "hip" (AMD) and "cuda" (NVIDIA) to the registry. `base` gives what BackendOptions
// does not: libraries and images other than the default ones.
absl::Status RegisterGpuBackends(BackendRegistry& registry, const HipBackendOptions& base = {});

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_HIP_BACKEND_H_
