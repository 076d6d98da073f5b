// One launch being recorded or running: its regions of pinned and device memory, its steps, and the
// events that order them over the three streams.
//
//   copy-in stream   metadata, inputs --> inputs_ready
//   compute stream                        wait, started, steps, computed
//   copy-out stream                                              wait, outputs --> done
#ifndef MLA_KERNELS_HIP_LAUNCH_SLOT_H_
#define MLA_KERNELS_HIP_LAUNCH_SLOT_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/hip/device_memory.h"
#include "kernels/hip/gpu_runtime.h"

namespace mla::gpu {

struct Streams {
  Stream in = nullptr;
  Stream compute = nullptr;
  Stream out = nullptr;
};

struct SlotSizes {
  int64_t page_ranges = 0;  // a step each at most, besides kMaxSteps
  int64_t metadata = 0;
  int64_t input = 0;
  int64_t output = 0;
  int64_t workspace = 0;
};

class LaunchSlot {
 public:
  // Bounds of what a launch may record; more is RESOURCE_EXHAUSTED. A decode step of many sequences
  // stages one input and one or two outputs a request.
  static constexpr size_t kMaxSteps = 4096;
  static constexpr size_t kMaxTransfers = 16384;

  static absl::StatusOr<std::unique_ptr<LaunchSlot>> Create(GpuRuntime* runtime,
                                                            const Streams& streams,
                                                            std::shared_ptr<PinnedRanges> pinned,
                                                            const SlotSizes& sizes);
  ~LaunchSlot();
  LaunchSlot(const LaunchSlot&) = delete;
  LaunchSlot& operator=(const LaunchSlot&) = delete;

  absl::Status Begin();
  // FAILED_PRECONDITION unless between Begin and Submit.
  absl::Status CheckRecording() const;
  bool running() const { return state_ == State::kRunning; }

  // Memory in a pinned range is copied by the device itself; the bytes of other memory pass through
  // the slot's pinned region.
  absl::StatusOr<const void*> StageInput(const void* host, int64_t bytes);
  absl::StatusOr<void*> StageOutput(void* host, int64_t bytes);
  // The same for a matrix in parts.
  absl::StatusOr<const void*> StageInputParts(int64_t rows,
                                              std::span<const kernels::InputPart> parts);
  absl::StatusOr<void*> StageOutputParts(int64_t rows, std::span<const kernels::OutputPart> parts);
  absl::StatusOr<void*> Workspace(int64_t bytes);
  StagedRegion& metadata() { return metadata_; }

  template <class Args>
  absl::Status AddKernel(Function function, const LaunchShape& shape, const Args& args) {
    static_assert(sizeof(Args) <= kArgBytes);
    return AddKernelBytes(function, shape, &args, sizeof(Args));
  }

  // Enqueues everything; the device starts as soon as earlier launches allow. FAILED_PRECONDITION
  // when staged memory is pinned no more.
  absl::Status Submit();
  absl::StatusOr<bool> Done();
  // Waits, hands outputs over and returns the nanoseconds the steps took. DEADLINE_EXCEEDED when
  // the device has not answered within `watchdog`.
  absl::StatusOr<int64_t> Wait(std::chrono::milliseconds watchdog);

 private:
  enum class State : uint8_t { kIdle, kRecording, kRunning };
  static constexpr size_t kArgBytes = 128;
  struct Step {  // a kernel
    Function function = nullptr;
    LaunchShape shape;
    alignas(16) std::array<std::byte, kArgBytes> args;
  };
  struct Transfer {
    std::byte* host = nullptr;  // rows of `bytes`, one after the other
    int64_t offset = 0;         // of the first row in the input or output region
    int64_t bytes = 0;          // of a row
    int64_t rows = 1;
    int64_t pitch = 0;  // from row to row in the region
    bool direct = false;
  };

  LaunchSlot(GpuRuntime* runtime, const Streams& streams, std::shared_ptr<PinnedRanges> pinned)
      : runtime_(runtime), streams_(streams), pinned_(std::move(pinned)) {}
  // Whether the device's copies reach these bytes by themselves, as is then noted.
  bool Reaches(const void* host, int64_t bytes);
  void EndCopies();
  absl::Status AddKernelBytes(Function function, const LaunchShape& shape, const void* args,
                              size_t bytes);
  absl::Status AddInput(const Transfer& transfer);
  absl::Status AddOutput(const Transfer& transfer);
  absl::Status CopyIn(const Transfer& transfer);
  absl::Status CopyOut(const Transfer& transfer);
  absl::Status SubmitInputs();
  absl::Status SubmitSteps();
  absl::Status SubmitOutputs();

  GpuRuntime* runtime_;
  Streams streams_;
  const std::shared_ptr<PinnedRanges> pinned_;
  std::vector<PinnedRanges::Id> reached_;  // each once
  State state_ = State::kIdle;
  StagedRegion metadata_, input_, output_;
  DeviceBuffer workspace_;
  int64_t workspace_used_ = 0;
  std::vector<Step> steps_;
  std::vector<Transfer> inputs_, outputs_;
  bool staged_input_ = false, staged_output_ = false;
  Event inputs_ready_ = nullptr, started_ = nullptr, computed_ = nullptr, done_ = nullptr;
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_LAUNCH_SLOT_H_
