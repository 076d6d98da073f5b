// The launch that is being recorded for a slot: its kernels, its metadata, and what decides how its
// tensors are copied. SubmittedLaunch then gives it to the device.
//
// If no other launch runs, inputs that are not large are copied on the compute stream. Small
// tensors are then copied by a kernel (TensorMove), if kernels reach host memory. If both inputs
// and outputs are, the launch is one sequence of kernels with one event after it, and the copying
// kernels measure the time of the kernels between them.
//
// Ownership: owns the slot's buffers. Threading: as the slot's. Nothing is allocated after the
// constructor.
#ifndef MLA_KERNELS_HIP_SLOT_LAUNCH_RECORDING_H_
#define MLA_KERNELS_HIP_SLOT_LAUNCH_RECORDING_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/args/gate_args.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/hip/runtime/kernel_graphs.h"
#include "kernels/hip/slot/tensor_copies.h"
#include "kernels/types/launch.h"

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

// Memory of a slot's launches that does not hold their tensors.
struct SlotBuffers {
  StagedRegion metadata;
  DeviceBuffer workspace, gate_outcome, digests;
  PinnedBuffer gate_report, digests_back;

  static absl::StatusOr<SlotBuffers> Create(GpuRuntime* runtime, const SlotSizes& sizes);
};

class LaunchRecording final {
 public:
  // Bound of a launch; beyond it RESOURCE_EXHAUSTED.
  static constexpr size_t kMaxKernels = 4096;
  // The kernels copy at most this number of bytes of a launch's inputs, or of its outputs, and at
  // most this number of pieces. More would take as long on the bus as the time until the next
  // launch.
  static constexpr int64_t kMovedBytes = 2 << 20;
  static constexpr size_t kMoves = 8;
  // A launch's signal, which is one block, copies at most this number of bytes.
  static constexpr int64_t kSignalCopyBytes = 64 << 10;

  // `runtime` and `copies` outlive it.
  LaunchRecording(const GpuRuntime* runtime, const Streams& streams, TensorCopies* copies,
                  SlotBuffers buffers, const SlotSizes& sizes);
  LaunchRecording(const LaunchRecording&) = delete;
  LaunchRecording& operator=(const LaunchRecording&) = delete;

  // Empties metadata and kernels for a launch with these tensors. `alone`: no other launch runs.
  // REQUIRES: the slot is idle.
  void Begin(const Launch& launch, const LaunchTensors& tensors, bool alone);

  StagedRegion& metadata() { return buffers_.metadata; }
  const SlotBuffers& buffers() const { return buffers_; }
  // Returns true if the device reaches these bytes directly; it then may until the launch has
  // ended.
  bool Reaches(const void* host, int64_t bytes) { return copies_->Reaches(host, bytes); }

  // --- Kernels.
  template <class Args>
  absl::Status AddKernel(Function function, const LaunchShape& shape, const Args& args) {
    static_assert(sizeof(Args) <= PendingKernel::kArgBytes);
    return AddKernelBytes(function, shape, &args, sizeof(Args));
  }
  std::span<const PendingKernel> kernels() const { return kernels_; }
  // Mark the timed range: the time of a launch is that of the kernels added between the two calls.
  // Kernels before and after it make copies.
  void BeginTimed() { timed_begin_ = kernels_.size(); }
  void EndTimed() { timed_end_ = kernels_.size(); }
  size_t timed_begin() const { return timed_begin_; }
  size_t timed_end() const { return timed_end_; }

  // --- Copies.
  // Copies that kernels of this launch must make before its first kernel and after its last. Valid
  // until the next Begin. Empty if copy commands make them.
  std::span<const TensorMove> input_moves() const { return input_moves_; }
  std::span<const TensorMove> output_moves() const { return output_moves_; }
  // Returns true if the launch is one sequence of kernels, copies included.
  bool one_sequence() const { return one_sequence_; }
  // Returns where the copies of a launch that is one sequence store its times (CopyTensorsArgs);
  // null for other launches.
  uint64_t* kernels_begun() const { return one_sequence_ ? &gate_outcome()->ended : nullptr; }
  uint64_t* kernels_lasted() const { return one_sequence_ ? &gate_report()->ended : nullptr; }
  // Returns the stream of the launch's inputs. Its kernels wait for that stream if it has work;
  // NoteInput says that some was enqueued.
  Stream input_stream() const { return input_stream_; }
  void NoteInput() { has_input_ = true; }
  bool has_input() const { return has_input_; }
  // Returns true if the timed kernels store all outputs of the launch in place.
  bool outputs_in_place() const { return outputs_in_place_; }
  // Returns the copy that the signal must make for that, or no bytes.
  const TensorMove& signal_copy() const { return signal_copy_; }

  // --- Inputs that are copied while the kernels run, which see them arrive. Until they arrive,
  // each of their words is kToCome. Once all have arrived, `*word` equals `ticket`, which no
  // earlier launch had. The kernels wait for them up to a limit and then end without them
  // (StreamArgs).
  struct Arrivals {
    // These copies are in the order of device addresses, and come after all other inputs. They are
    // valid until the submission.
    std::span<const TensorMove> copies;
    DevicePtr word = 0;
    uint32_t ticket = 0;
    // The kernels report here, by `ticket` in its tickets, that all outputs are in host memory.
    const StreamReport* report = nullptr;
  };
  // Call directly after Begin.
  void SetArrivals(const Arrivals& arrivals) {
    arrivals_ = arrivals;
    one_sequence_ = false;
  }
  const Arrivals& arrivals() const { return arrivals_; }

  // --- The gate and the signals.
  // Says that the timed kernels begin with a gate (gate_args.h), which was added last, and end with
  // a signal, which stores the gate's outcome in pinned memory. The launch's time excludes the
  // gate's wait. `far`: the gate waits for work of other devices alone.
  void NoteGate(bool far) {
    gated_ = follows_gate_ = true;
    gate_is_far_ = far;
  }
  bool gated() const { return gated_; }
  bool gate_is_far() const { return gate_is_far_; }
  GateOutcome* gate_outcome() const { return buffers_.gate_outcome.As<GateOutcome>(); }
  GateOutcome* gate_report() const {
    return reinterpret_cast<GateOutcome*>(buffers_.gate_report.data());
  }
  // On the device: not 0 once the gate has run out of time. Null if there is no gate.
  const uint32_t* late_word() const { return gated_ ? &gate_outcome()->late : nullptr; }
  // Says that the device stores all of the launch's signals, unless it is late.
  void NoteSignals(bool all) { signals_ = all; }
  bool signals() const { return signals_; }

  // --- Digests of page transfers: of the launch's page writes, after they are written, or of its
  // page reads, before they leave. The kernel stores them in `digests()` from the `first`-th on;
  // the caller gets them when the launch has ended.
  struct Digests {
    std::span<const PageTransfer> transfers;
    int64_t first = 0, parts = 0;
    PendingKernel kernel;
  };
  uint64_t* digests() const;
  int64_t digests_taken() const { return writes_.parts + reads_.parts; }
  void SetWriteDigests(const Digests& digests) { writes_ = digests; }
  void SetReadDigests(const Digests& digests) { reads_ = digests; }
  const Digests& writes() const { return writes_; }
  const Digests& reads() const { return reads_; }

 private:
  bool CopiedBySignal(const Launch& launch, const HostOutput& out);
  absl::Status AddKernelBytes(Function function, const LaunchShape& shape, const void* args,
                              size_t bytes);

  const GpuRuntime* const runtime_;
  const Streams streams_;
  TensorCopies* const copies_;
  SlotBuffers buffers_;
  std::vector<PendingKernel> kernels_;
  size_t timed_begin_ = 0, timed_end_ = 0;
  std::vector<TensorMove> input_moves_, output_moves_;
  bool one_sequence_ = false;
  Stream input_stream_ = nullptr;  // one of the streams
  bool has_input_ = false;         // some input of the launch is enqueued there
  bool outputs_in_place_ = false;
  TensorMove signal_copy_ = {};
  Arrivals arrivals_;
  bool gated_ = false, gate_is_far_ = false;
  bool follows_gate_ = false;  // the next kernel does
  bool signals_ = false;
  Digests writes_, reads_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_LAUNCH_RECORDING_H_
