// A place for one launch on the device: its regions of pinned and device memory, the launch that is
// being recorded, and the launch that was submitted.
//
// Threading: one thread at a time. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_
#define MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/hip/slot/submitted_launch.h"
#include "kernels/hip/slot/tensor_copies.h"

namespace mla::kernels::hip {

class LaunchSlot final {
 public:
  // Bound of a launch's inputs, and of its outputs; beyond it RESOURCE_EXHAUSTED. A decode step of
  // many sequences has one input and one or two outputs a request.
  static constexpr size_t kMaxTransfers = 16384;

  static absl::StatusOr<std::unique_ptr<LaunchSlot>> Create(GpuRuntime* runtime,
                                                            const Streams& streams,
                                                            std::shared_ptr<PinnedRanges> pinned,
                                                            const SlotSizes& sizes);
  LaunchSlot(const LaunchSlot&) = delete;
  LaunchSlot& operator=(const LaunchSlot&) = delete;

  SlotMemory Memory() const;
  HostWork work() const {
    HostWork work = submitted_->work();
    work.copied_bytes = copies_.copied_bytes();
    return work;
  }
  // REQUIRES to fill it: its Begin was called, and neither Submit nor Abandon since.
  LaunchRecording& recording() { return *recording_; }
  const LaunchRecording& recording() const { return *recording_; }
  void Abandon() { copies_.End(); }
  // As SubmittedLaunch::Submit.
  absl::Status Submit(const Launch& launch, const LaunchTensors& tensors, DevicePtr pool);
  SubmittedLaunch& submitted() { return *submitted_; }
  const SubmittedLaunch& submitted() const { return *submitted_; }

 private:
  explicit LaunchSlot(TensorCopies copies) : copies_(std::move(copies)) {}

  TensorCopies copies_;
  std::unique_ptr<LaunchRecording> recording_;
  std::unique_ptr<SubmittedLaunch> submitted_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_
