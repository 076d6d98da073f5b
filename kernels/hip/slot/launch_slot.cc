#include "kernels/hip/slot/launch_slot.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

absl::Status Full(const char* what) {
  return absl::ResourceExhaustedError(
      absl::StrCat("launch ", what, ": limit ", LaunchSlot::kMaxTransfers));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaunchSlot>> LaunchSlot::Create(GpuRuntime* runtime,
                                                               const Streams& streams,
                                                               std::shared_ptr<PinnedRanges> pinned,
                                                               const SlotSizes& sizes) {
  MLA_ASSIGN_OR_RETURN(SlotBuffers buffers, SlotBuffers::Create(runtime, sizes));
  MLA_ASSIGN_OR_RETURN(
      TensorCopies copies,
      TensorCopies::Create(runtime, std::move(pinned), sizes.input, sizes.output, kMaxTransfers));
  std::unique_ptr<LaunchSlot> slot(new LaunchSlot(std::move(copies)));
  slot->recording_ = std::make_unique<LaunchRecording>(runtime, streams, &slot->copies_,
                                                       std::move(buffers), sizes);
  MLA_ASSIGN_OR_RETURN(
      slot->submitted_,
      SubmittedLaunch::Create(runtime, streams, slot->recording_.get(), &slot->copies_));
  return slot;
}

SlotMemory LaunchSlot::Memory() const {
  const auto region = [](DevicePtr at, int64_t bytes) {
    return std::span(reinterpret_cast<std::byte*>(at), static_cast<size_t>(bytes));
  };
  const StagedRegion &input = copies_.input(), &output = copies_.output();
  const DeviceBuffer& workspace = recording_->buffers().workspace;
  return {region(input.device(0), input.bytes()), region(output.device(0), output.bytes()),
          region(workspace.at(), workspace.bytes())};
}

absl::Status LaunchSlot::Submit(const Launch& launch, const LaunchTensors& tensors,
                                DevicePtr pool) {
  if (tensors.inputs.size() > kMaxTransfers) return Full("inputs");
  if (tensors.outputs.size() > kMaxTransfers) return Full("outputs");
  return submitted_->Submit(launch, tensors, pool);
}

}  // namespace mla::kernels::hip
