// The launch that a slot has given to the device, with the events that order it over the three
// streams, and the wait for its end.
//
//   copy-in stream   metadata, inputs --> inputs_ready
//   compute stream                        wait, started, kernels, computed
//   copy-out stream                                              wait, outputs --> done
//
// In a launch with arrivals (LaunchRecording::SetArrivals), inputs continue to arrive while its
// kernels run:
//
//   copy-in stream   wait for cleared, arrivals --> arrived
//   compute stream      kernels ........................ wait, computed, clear --> cleared
//
// Their target was cleared after the previous launch, if that one had arrivals there too.
//
// Separate streams let copies overlap with the kernels of other launches. Changing streams takes
// the device some microseconds, and so does changing between copies and kernels on one stream.
// Metadata equal to that of the slot's previous launch is not uploaded. If no output is copied,
// because kernels write all of them to host memory, the launch ends with `computed`; a launch with
// arrivals ends with its kernels' report. Kernels between two events whose sequence occurred before
// are launched as one graph (kernel_graphs.h).
//
// Threading: as the slot's. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_SLOT_SUBMITTED_LAUNCH_H_
#define MLA_KERNELS_HIP_SLOT_SUBMITTED_LAUNCH_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/hip/runtime/kernel_graphs.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/hip/slot/tensor_copies.h"

namespace mla::kernels::hip {

class SubmittedLaunch final {
 public:
  // All arguments outlive it. The launches that it submits are those that `recording` holds then.
  static absl::StatusOr<std::unique_ptr<SubmittedLaunch>> Create(GpuRuntime* runtime,
                                                                 const Streams& streams,
                                                                 LaunchRecording* recording,
                                                                 TensorCopies* copies);
  ~SubmittedLaunch();
  SubmittedLaunch(const SubmittedLaunch&) = delete;
  SubmittedLaunch& operator=(const SubmittedLaunch&) = delete;

  // Enqueues copies and kernels; the device starts as soon as earlier launches allow. Launch,
  // tensors and recording must stay unchanged until Wait has returned.
  // Page transfers keep the order of launches: the device copies them between the kernels of
  // earlier and of later launches. `pool` is where the pool begins.
  absl::Status Submit(const Launch& launch, const LaunchTensors& tensors, DevicePtr pool);
  bool running() const { return running_; }
  // Returns true if the launch has ended; after that, the device is not asked again.
  absl::StatusOr<bool> Done();
  // Returns true if the launch had not ended when Done was called, and Done was first called longer
  // ago than `watchdog`.
  bool Overdue(std::chrono::milliseconds watchdog) const;
  // Waits, passes outputs to the caller and returns the nanoseconds that the kernels took. For a
  // streamed launch they include the time on the bus. DEADLINE_EXCEEDED if the device has not
  // answered within `watchdog` of the first call of Done, or of this one.
  absl::StatusOr<int64_t> Wait(std::chrono::milliseconds watchdog);
  // REQUIRES, for both: Wait has returned for the launch.
  bool was_late() const { return was_late_; }
  int64_t waited_ns() const { return waited_ns_; }
  const HostWork& work() const { return work_; }

 private:
  // The memory to which arrivals are copied.
  struct Range {
    DevicePtr begin = 0, end = 0;
  };

  SubmittedLaunch(GpuRuntime* runtime, const Streams& streams, LaunchRecording* recording,
                  TensorCopies* copies)
      : runtime_(runtime), streams_(streams), recording_(*recording), copies_(copies) {}
  absl::Status Enqueue(const Launch& launch, const LaunchTensors& tensors, DevicePtr pool);
  // Enqueues a whole launch that is one sequence.
  absl::Status EnqueueSequence(std::span<const HostInput> inputs);
  // Enqueues metadata and the tensors that pass through the staged region.
  absl::Status EnqueueStaged(std::span<const HostInput> inputs);
  absl::Status EnqueueInputs(std::span<const HostInput> inputs);
  // Clears the memory of this launch's arrivals if that has not been done yet.
  absl::Status ClearArrivals();
  absl::Status EnqueueArrivals();
  Range ArrivalRange() const;
  absl::Status Clear(const Range& range, Stream stream);
  // Enqueues on the stream of the kernels.
  absl::Status EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool);
  absl::Status EnqueueKernels(size_t begin, size_t end);
  absl::Status EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool);
  absl::Status EnqueueDigests(const LaunchRecording::Digests& digests);
  absl::Status EnqueueOutputs(std::span<const HostOutput> outputs);
  absl::StatusOr<bool> AskDone() const;
  // Waits until the launch has ended.
  absl::Status AwaitEnd(std::chrono::milliseconds watchdog);
  void TakeDigests(const LaunchRecording::Digests& digests) const;

  GpuRuntime* const runtime_;
  const Streams streams_;
  LaunchRecording& recording_;
  TensorCopies* const copies_;
  // Graphs of this slot's own, because most of its launches have the same sequences between two
  // events, with arguments that differ only by layer. Null: the runtime has none.
  std::unique_ptr<KernelGraphs> graphs_;
  std::vector<std::span<const PendingKernel>> one_by_one_;  // sequences launched kernel by kernel
  Event inputs_ready_ = nullptr, started_ = nullptr, computed_ = nullptr, done_ = nullptr;
  Event cleared_ = nullptr, arrived_ = nullptr;
  Range cleared_range_;  // range that is kToCome after cleared_; empty: none

  bool running_ = false;
  bool seen_done_ = false;
  std::chrono::steady_clock::time_point first_look_;  // that has not seen the end; 0: none yet
  Event end_ = nullptr;                               // computed_ or done_
  // The report of a launch with arrivals, and whether the launch ends with the report or with end_.
  const StreamReport* report_ = nullptr;
  bool ends_with_report_ = false;
  uint32_t ticket_ = 0;
  std::span<const HostOutput> outputs_;
  std::chrono::steady_clock::time_point submitted_;
  bool was_late_ = false;
  int64_t waited_ns_ = 0;
  HostWork work_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_SUBMITTED_LAUNCH_H_
