// One launch on the device: its regions of pinned and device memory, its kernels, and the events
// that order them over the three streams.
//
//   copy-in stream   metadata, inputs --> inputs_ready
//   compute stream                        wait, started, kernels, computed
//   copy-out stream                                              wait, outputs --> done
//
// Of a launch with arrivals (SetArrivals), inputs go on arriving while its kernels run:
//
//   copy-in stream   wait for cleared, arrivals --> arrived
//   compute stream      kernels ........................ wait, computed, clear --> cleared
//
// What they arrive in was cleared behind the launch before, if that one had arrivals there too.
//
// Streams of their own let copies overlap the kernels of other launches; changing from one to the
// other takes the device some microseconds, as changing between copies and kernels on one stream
// does. Where no other launch runs, inputs that are not large travel on the compute stream, and
// tensors that are small travel by a kernel (TensorMove) if kernels reach the host's memory: where
// both inputs and outputs do, all is one sequence of kernels with one event behind it, and the
// copying kernels take the time of those between them. Metadata that is what the slot's launch
// before had stays where it is. Where no output is copied, because kernels write all of them to the
// host's memory, `computed` is the launch's end; of one with arrivals its kernels' report is.
// Kernels between two events that came in this sequence before are launched as one graph
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
  int64_t page_ranges = 0;  // a kernel each at most, besides kMaxKernels
  int64_t metadata = 0;
  int64_t input = 0;
  int64_t output = 0;
  int64_t workspace = 0;
  int64_t digests = 0;  // of page writes and page reads together
};

class LaunchSlot {
 public:
  // Bounds of a launch; more is RESOURCE_EXHAUSTED. A decode step of many sequences has one input
  // and one or two outputs a request.
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

  // Most bytes of a launch's inputs, or of its outputs, that travel by a kernel, and most pieces.
  // More take as long on the bus as the next launch takes to come.
  static constexpr int64_t kMovedBytes = 2 << 20;
  static constexpr size_t kMoves = 8;
  // Most bytes that a launch's signal copies, one block.
  static constexpr int64_t kSignalCopyBytes = 64 << 10;

  // Empties metadata and kernels, which are those of the next Submit, of `launch`. `alone`: no
  // other launch runs. Submit or Abandon follows. REQUIRES: the slot does not run.
  void Begin(const Launch& launch, bool alone);
  void Abandon();
  // What kernels of this launch have to copy, before its first one and behind its last; valid until
  // the next Begin. Empty: copies do.
  std::span<const TensorMove> input_moves() const { return input_moves_; }
  std::span<const TensorMove> output_moves() const { return output_moves_; }
  // Inputs that are copied while the kernels run, which see them arrive: until they do, each of
  // their words is kToCome, and once all have, `*word` is `ticket`, which it never was before. The
  // kernels wait for them within a bound and end without them (StreamArgs).
  struct Arrivals {
    // In the order of device addresses, and behind all else that is copied in. Valid until Submit.
    std::span<const TensorMove> copies;
    DevicePtr word = 0;
    uint32_t ticket = 0;
    // Where the kernels say that all outputs are in the host's memory: by `ticket` in its tickets.
    const StreamReport* report = nullptr;
  };
  // Right behind Begin.
  void SetArrivals(const Arrivals& arrivals) {
    arrivals_ = arrivals;
    one_sequence_ = false;
  }
  // Kernels added from here on, or up to here, are what Wait's time is of; those before and behind
  // copy.
  void BeginTimed() { timed_begin_ = kernels_.size(); }
  void EndTimed() { timed_end_ = kernels_.size(); }
  // What the inputs of that launch travel on; its kernels wait for it if something does, which
  // NoteInput says where others than this class have enqueued it.
  Stream input_stream() const { return input_stream_; }
  void NoteInput() { has_input_ = true; }
  // The timed kernels bring all outputs of that launch where they belong.
  bool outputs_in_place() const { return outputs_in_place_; }
  // What the signal has to copy for that, or no bytes.
  const TensorMove& signal_copy() const { return signal_copy_; }
  // The timed kernels begin with a gate (gate_args.h), the last kernel so far, and end with a
  // signal, which brings its outcome to pinned memory. Wait's time is without what it waited.
  // `far`: what it waits for is done by another device.
  void NoteGate(bool far) {
    gated_ = behind_gate_ = true;
    gate_is_far_ = far;
  }
  bool gate_is_far() const { return gate_is_far_; }
  // Where the copies of a launch that is one sequence leave what Wait's time is of
  // (CopyTensorsArgs); null for other launches.
  uint64_t* kernels_begun() const { return one_sequence_ ? &gate_outcome()->ended : nullptr; }
  uint64_t* kernels_lasted() const { return one_sequence_ ? &gate_report()->ended : nullptr; }
  // All of the launch's signals are stored by the device, unless it is late.
  void NoteSignals(bool all) { signals_ = all; }
  bool signals() const { return signals_; }
  GateOutcome* gate_outcome() const { return outcome_.As<GateOutcome>(); }
  GateOutcome* gate_report() const { return reinterpret_cast<GateOutcome*>(gate_report_.data()); }
  bool gated() const { return gated_; }
  // On the device: not 0 once the gate has run out of time. Null without a gate.
  const uint32_t* late_word() const { return gated_ ? &gate_outcome()->late : nullptr; }
  // Of the launch that Wait has returned for.
  bool was_late() const { return was_late_; }
  int64_t waited_ns() const { return waited_ns_; }
  StagedRegion& metadata() { return metadata_; }
  template <class Args>
  absl::Status AddKernel(Function function, const LaunchShape& shape, const Args& args) {
    static_assert(sizeof(Args) <= PendingKernel::kArgBytes);
    return AddKernelBytes(function, shape, &args, sizeof(Args));
  }

  // The kernel that makes the digests of transfers, of the launch's page writes (behind them) or of
  // its page reads (before them), into `digests()` from the `first`-th on. Wait hands them over.
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

  // Whether the device reaches these bytes by itself; it may until the launch has ended.
  bool Reaches(const void* host, int64_t bytes) { return tensors_.Reaches(host, bytes); }

  // Enqueues copies and kernels; the device starts as soon as earlier launches allow. The launch
  // stays as it is until Wait has returned.
  // Page transfers keep the order of launches: the device copies them between the kernels of
  // earlier and of later ones. `pool` is where the pool begins.
  absl::Status Submit(const Launch& launch, DevicePtr pool);
  // Whether the launch has ended; once it has, the device is not asked again.
  absl::StatusOr<bool> Done();
  // Waits, hands outputs over and returns the nanoseconds the kernels took, which of a streamed
  // launch includes what the bus took. DEADLINE_EXCEEDED when the device has not answered within
  // `watchdog`.
  absl::StatusOr<int64_t> Wait(std::chrono::milliseconds watchdog);

 private:
  LaunchSlot(GpuRuntime* runtime, const Streams& streams, TensorCopies tensors)
      : runtime_(runtime), streams_(streams), tensors_(std::move(tensors)) {}
  bool CopiedBySignal(const Launch& launch, const HostOutput& out);
  absl::StatusOr<bool> AskDone() const;
  absl::Status AddKernelBytes(Function function, const LaunchShape& shape, const void* args,
                              size_t bytes);
  absl::Status Enqueue(const Launch& launch, DevicePtr pool);
  // Metadata and what passes through the staged region.
  absl::Status EnqueueStaged(std::span<const HostInput> inputs);
  absl::Status EnqueueInputs(std::span<const HostInput> inputs);
  // Where the memory of this launch's arrivals is not clear yet.
  absl::Status ClearArrivals();
  absl::Status EnqueueArrivals();
  // What the arrivals are copied to.
  struct Range {
    DevicePtr begin = 0, end = 0;
  };
  Range ArrivalRange() const;
  absl::Status Clear(const Range& range, Stream stream);
  // On the stream of the kernels.
  absl::Status EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool);
  absl::Status EnqueueKernels(size_t begin, size_t end);
  // All that a launch consists of which is one sequence.
  absl::Status EnqueueSequence(const Launch& launch);
  absl::Status EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool);
  absl::Status EnqueueDigests(const Digests& digests);
  void TakeDigests(const Digests& digests) const;
  absl::Status EnqueueOutputs(std::span<const HostOutput> outputs);

  GpuRuntime* runtime_;
  Streams streams_;
  Stream input_stream_ = nullptr;  // one of them
  bool has_input_ = false;         // something of the launch is enqueued there
  bool outputs_in_place_ = false;
  bool one_sequence_ = false;  // of kernels, copies included
  bool gated_ = false, was_late_ = false;
  bool behind_gate_ = false;  // the next kernel is
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
  // A sequence between two events of a launch has the same arguments but for its layer's in most of
  // this slot's launches, so the slot has graphs of its own. Null: the runtime has none.
  std::unique_ptr<KernelGraphs> graphs_;
  std::vector<std::span<const PendingKernel>> one_by_one_;  // sequences that went to the device so
  size_t timed_begin_ = 0, timed_end_ = 0;
  std::vector<TensorMove> input_moves_, output_moves_;
  TensorMove signal_copy_ = {};
  Arrivals arrivals_;
  // The report of the launch that runs, if it has arrivals, and whether the launch ends with that,
  // else with end_.
  const StreamReport* report_ = nullptr;
  bool ends_with_report_ = false;
  uint32_t ticket_ = 0;
  Range cleared_range_;                  // that is kToCome behind cleared_; empty: none
  std::span<const HostOutput> outputs_;  // of the launch that runs
  Event inputs_ready_ = nullptr, started_ = nullptr, computed_ = nullptr, done_ = nullptr;
  Event cleared_ = nullptr, arrived_ = nullptr;
  Event end_ = nullptr;  // of the launch that runs: computed_ or done_
  std::chrono::steady_clock::time_point submitted_;
  HostWork work_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_LAUNCH_SLOT_H_
