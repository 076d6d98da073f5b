// One launch on the device: its regions of pinned and device memory, its kernels, and the events
// that order them over the three streams.
//
//   copy-in stream   metadata, inputs --> inputs_ready
//   compute stream                        wait, started, kernels, computed
//   copy-out stream                                              wait, outputs --> done
//
// In a launch with arrivals (SetArrivals), inputs continue to arrive while its kernels run:
//
//   copy-in stream   wait for cleared, arrivals --> arrived
//   compute stream      kernels ........................ wait, computed, clear --> cleared
//
// Their target was cleared after the previous launch, if that one had arrivals there too.
//
// Separate streams let copies overlap with the kernels of other launches. Changing streams takes
// the device some microseconds, and so does changing between copies and kernels on one stream. If
// no other launch runs, inputs that are not large are therefore copied on the compute stream. Small
// tensors are then copied by a kernel (TensorMove), if kernels reach host memory. If both inputs
// and outputs are, the launch is one sequence of kernels with one event after it, and the copying
// kernels measure the time of the kernels between them. Metadata equal to that of the slot's
// previous launch is not uploaded. If no output is copied, because kernels write all of them to
// host memory, the launch ends with `computed`; a launch with arrivals ends with its kernels'
// report. Kernels between two events whose sequence occurred before are launched as one graph
// (kernel_graphs.h).
#ifndef MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_
#define MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention_backend.h"
#include "kernels/hip/args/gate_args.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/hip/runtime/kernel_graphs.h"
#include "kernels/hip/slot/tensor_copies.h"

namespace mla::kernels::hip {

struct Streams {
  Stream in = nullptr;
  Stream compute = nullptr;
  Stream out = nullptr;
  std::array<Stream, 3> all() const { return {in, compute, out}; }
};

struct SlotSizes {
  int64_t page_ranges = 0;  // at most one kernel each, in addition to kMaxKernels
  int64_t metadata = 0;
  int64_t input = 0;
  int64_t output = 0;
  int64_t workspace = 0;
  int64_t digests = 0;  // for page writes and page reads together
};

class LaunchSlot {
 public:
  // Bounds of a launch; beyond them RESOURCE_EXHAUSTED. A decode step of many sequences has one
  // input and one or two outputs a request.
  static constexpr size_t kMaxKernels = 4096;
  static constexpr size_t kMaxTransfers = 16384;

  static absl::StatusOr<std::unique_ptr<LaunchSlot>> Create(GpuRuntime* runtime,
                                                            const Streams& streams,
                                                            std::shared_ptr<PinnedRanges> pinned,
                                                            const SlotSizes& sizes);
  ~LaunchSlot();
  LaunchSlot(const LaunchSlot&) = delete;
  LaunchSlot& operator=(const LaunchSlot&) = delete;

  SlotMemory Memory() const;
  bool running() const { return running_; }
  HostWork work() const {
    HostWork work = work_;
    work.copied_bytes = tensors_.copied_bytes();
    return work;
  }

  // Most bytes of a launch's inputs, or of its outputs, that kernels copy, and most pieces. More
  // would take as long on the bus as the time until the next launch.
  static constexpr int64_t kMovedBytes = 2 << 20;
  static constexpr size_t kMoves = 8;
  // Most bytes that a launch's signal copies, one block.
  static constexpr int64_t kSignalCopyBytes = 64 << 10;

  // Empties metadata and kernels for the next Submit, of `launch`. `alone`: no other launch runs.
  // Submit or Abandon must follow. REQUIRES: the slot is idle.
  void Begin(const Launch& launch, bool alone);
  void Abandon();
  // Copies that kernels of this launch must make before its first kernel and after its last. Valid
  // until the next Begin. Empty if copy commands make them.
  std::span<const TensorMove> input_moves() const { return input_moves_; }
  std::span<const TensorMove> output_moves() const { return output_moves_; }
  // Inputs that are copied while the kernels run, which see them arrive. Until they arrive, each of
  // their words is kToCome. Once all have arrived, `*word` equals `ticket`, which no earlier launch
  // had. The kernels wait for them up to a limit and then end without them (StreamArgs).
  struct Arrivals {
    // In the order of device addresses, copied after all other inputs. Valid until Submit.
    std::span<const TensorMove> copies;
    DevicePtr word = 0;
    uint32_t ticket = 0;
    // Where the kernels report, by `ticket` in its tickets, that all outputs are in host memory.
    const StreamReport* report = nullptr;
  };
  // Call directly after Begin.
  void SetArrivals(const Arrivals& arrivals) {
    arrivals_ = arrivals;
    one_sequence_ = false;
  }
  // Mark the timed range: Wait returns the time of the kernels added between the two calls. Kernels
  // before and after it make copies.
  void BeginTimed() { timed_begin_ = kernels_.size(); }
  void EndTimed() { timed_end_ = kernels_.size(); }
  // Stream of the launch's inputs. Its kernels wait for that stream if it has work; NoteInput says
  // that other classes have enqueued some.
  Stream input_stream() const { return input_stream_; }
  void NoteInput() { has_input_ = true; }
  // True if the timed kernels store all outputs of the launch in place.
  bool outputs_in_place() const { return outputs_in_place_; }
  // The copy that the signal must make for that, or no bytes.
  const TensorMove& signal_copy() const { return signal_copy_; }
  // Says that the timed kernels begin with a gate (gate_args.h), which was added last, and end with
  // a signal, which stores the gate's outcome in pinned memory. The time that Wait returns excludes
  // the gate's wait. `far`: the gate waits for work of another device.
  void NoteGate(bool far) {
    gated_ = behind_gate_ = true;
    gate_is_far_ = far;
  }
  bool gate_is_far() const { return gate_is_far_; }
  // Where the copies of a launch that is one sequence store the times for Wait (CopyTensorsArgs);
  // null for other launches.
  uint64_t* kernels_begun() const { return one_sequence_ ? &gate_outcome()->ended : nullptr; }
  uint64_t* kernels_lasted() const { return one_sequence_ ? &gate_report()->ended : nullptr; }
  // Says that the device stores all of the launch's signals, unless it is late.
  void NoteSignals(bool all) { signals_ = all; }
  bool signals() const { return signals_; }
  GateOutcome* gate_outcome() const { return outcome_.As<GateOutcome>(); }
  GateOutcome* gate_report() const { return reinterpret_cast<GateOutcome*>(gate_report_.data()); }
  bool gated() const { return gated_; }
  // On the device: not 0 once the gate has run out of time. Null if there is no gate.
  const uint32_t* late_word() const { return gated_ ? &gate_outcome()->late : nullptr; }
  // REQUIRES: Wait has returned for the launch.
  bool was_late() const { return was_late_; }
  int64_t waited_ns() const { return waited_ns_; }
  StagedRegion& metadata() { return metadata_; }
  template <class Args>
  absl::Status AddKernel(Function function, const LaunchShape& shape, const Args& args) {
    static_assert(sizeof(Args) <= PendingKernel::kArgBytes);
    return AddKernelBytes(function, shape, &args, sizeof(Args));
  }

  // The kernel that makes the digests of transfers: of the launch's page writes, after they are
  // written, or of its page reads, before they leave. It stores them in `digests()` from the
  // `first`-th on, and Wait passes them to the caller.
  struct Digests {
    std::span<const PageTransfer> transfers;
    int64_t first = 0, parts = 0;
    PendingKernel kernel;
  };
  uint64_t* digests() const {
    return runtime_->kernels_reach_host() ? reinterpret_cast<uint64_t*>(digests_back_.data())
                                          : digests_.As<uint64_t>();
  }
  int64_t digests_taken() const { return writes_.parts + reads_.parts; }
  void SetWriteDigests(const Digests& digests) { writes_ = digests; }
  void SetReadDigests(const Digests& digests) { reads_ = digests; }

  // Returns true if the device reaches these bytes directly; it then may until the launch has
  // ended.
  bool Reaches(const void* host, int64_t bytes) { return tensors_.Reaches(host, bytes); }

  // Enqueues copies and kernels; the device starts as soon as earlier launches allow. The launch
  // must stay unchanged until Wait has returned.
  // Page transfers keep the order of launches: the device copies them between the kernels of
  // earlier and of later launches. `pool` is where the pool begins.
  absl::Status Submit(const Launch& launch, DevicePtr pool);
  // Returns true if the launch has ended; after that, the device is not asked again.
  absl::StatusOr<bool> Done();
  // Waits, passes outputs to the caller and returns the nanoseconds that the kernels took. For a
  // streamed launch they include the time on the bus. DEADLINE_EXCEEDED if the device has not
  // answered within `watchdog`.
  absl::StatusOr<int64_t> Wait(std::chrono::milliseconds watchdog);

 private:
  LaunchSlot(GpuRuntime* runtime, const Streams& streams, TensorCopies tensors)
      : runtime_(runtime), streams_(streams), tensors_(std::move(tensors)) {}
  bool CopiedBySignal(const Launch& launch, const HostOutput& out);
  absl::StatusOr<bool> AskDone() const;
  absl::Status AddKernelBytes(Function function, const LaunchShape& shape, const void* args,
                              size_t bytes);
  absl::Status Enqueue(const Launch& launch, DevicePtr pool);
  // Enqueues metadata and the tensors that pass through the staged region.
  absl::Status EnqueueStaged(std::span<const HostInput> inputs);
  absl::Status EnqueueInputs(std::span<const HostInput> inputs);
  // Clears the memory of this launch's arrivals if that has not been done yet.
  absl::Status ClearArrivals();
  absl::Status EnqueueArrivals();
  // Memory that arrivals are copied to.
  struct Range {
    DevicePtr begin = 0, end = 0;
  };
  Range ArrivalRange() const;
  absl::Status Clear(const Range& range, Stream stream);
  // On the stream of the kernels.
  absl::Status EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool);
  absl::Status EnqueueKernels(size_t begin, size_t end);
  // Enqueues a whole launch that is one sequence.
  absl::Status EnqueueSequence(const Launch& launch);
  absl::Status EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool);
  absl::Status EnqueueDigests(const Digests& digests);
  void TakeDigests(const Digests& digests) const;
  absl::Status EnqueueOutputs(std::span<const HostOutput> outputs);

  GpuRuntime* runtime_;
  Streams streams_;
  Stream input_stream_ = nullptr;  // one of the streams
  bool has_input_ = false;         // some input of the launch is enqueued there
  bool outputs_in_place_ = false;
  bool one_sequence_ = false;  // the launch is one sequence of kernels, copies included
  bool gated_ = false, was_late_ = false;
  bool behind_gate_ = false;  // true for the next kernel
  bool gate_is_far_ = false;
  bool signals_ = false;
  int64_t waited_ns_ = 0;
  bool running_ = false;
  bool seen_done_ = false;
  TensorCopies tensors_;
  StagedRegion metadata_;
  DeviceBuffer workspace_, outcome_;
  PinnedBuffer gate_report_;
  DeviceBuffer digests_;
  PinnedBuffer digests_back_;
  Digests writes_, reads_;
  std::vector<PendingKernel> kernels_;
  // Graphs of this slot's own, because most of its launches have the same sequences between two
  // events, with arguments that differ only by layer. Null: the runtime has none.
  std::unique_ptr<KernelGraphs> graphs_;
  std::vector<std::span<const PendingKernel>> one_by_one_;  // sequences launched kernel by kernel
  size_t timed_begin_ = 0, timed_end_ = 0;
  std::vector<TensorMove> input_moves_, output_moves_;
  TensorMove signal_copy_ = {};
  Arrivals arrivals_;
  // The report of the running launch if it has arrivals; and whether the launch ends with the
  // report or with end_.
  const StreamReport* report_ = nullptr;
  bool ends_with_report_ = false;
  uint32_t ticket_ = 0;
  Range cleared_range_;                  // range that is kToCome after cleared_; empty: none
  std::span<const HostOutput> outputs_;  // of the running launch
  Event inputs_ready_ = nullptr, started_ = nullptr, computed_ = nullptr, done_ = nullptr;
  Event cleared_ = nullptr, arrived_ = nullptr;
  Event end_ = nullptr;  // of the running launch: computed_ or done_
  std::chrono::steady_clock::time_point submitted_;
  HostWork work_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_
