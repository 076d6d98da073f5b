#include "kernels/hip/slot/launch_recording.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// A kernel that waits on the device's units next to a gate has at most this number of blocks.
constexpr uint32_t kBlocksNextToGate = 16;

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

}  // namespace

absl::StatusOr<SlotBuffers> SlotBuffers::Create(GpuRuntime* runtime, const SlotSizes& sizes) {
  SlotBuffers buffers;
  MLA_ASSIGN_OR_RETURN(buffers.metadata,
                       StagedRegion::Create(runtime, "launch metadata", sizes.metadata));
  MLA_ASSIGN_OR_RETURN(buffers.workspace, DeviceBuffer::Create(runtime, "slot workspace",
                                                               AlignRegion(sizes.workspace)));
  MLA_ASSIGN_OR_RETURN(buffers.gate_outcome,
                       DeviceBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome)));
  MLA_ASSIGN_OR_RETURN(buffers.gate_report,
                       PinnedBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome)));
  std::memset(buffers.gate_report.data(), 0, sizeof(GateOutcome));
  const int64_t digests = sizes.digests * static_cast<int64_t>(sizeof(PartDigest));
  MLA_ASSIGN_OR_RETURN(buffers.digests, DeviceBuffer::Create(runtime, "digests", digests));
  MLA_ASSIGN_OR_RETURN(buffers.digests_back, PinnedBuffer::Create(runtime, "digests", digests));
  return buffers;
}

LaunchRecording::LaunchRecording(const GpuRuntime* runtime, const Streams& streams,
                                 TensorCopies* copies, SlotBuffers buffers, const SlotSizes& sizes)
    : runtime_(runtime), streams_(streams), copies_(copies), buffers_(std::move(buffers)) {
  kernels_.reserve(kMaxKernels + static_cast<size_t>(sizes.page_ranges));
  input_moves_.reserve(kMoves);
  output_moves_.reserve(kMoves);
}

void LaunchRecording::Begin(const Launch& launch, const LaunchTensors& tensors, bool alone) {
  const int64_t bytes = TensorCopies::BytesOf(tensors.inputs);
  input_stream_ = alone && bytes <= kMovedBytes ? streams_.compute : streams_.in;
  has_input_ = gated_ = follows_gate_ = gate_is_far_ = signals_ = one_sequence_ = false;
  signal_copy_ = {};
  arrivals_ = {};
  outputs_in_place_ = std::all_of(
      tensors.outputs.begin(), tensors.outputs.end(),
      [&](const HostOutput& out) { return out.in_place() || CopiedBySignal(launch, out); });
  if (!outputs_in_place_) signal_copy_ = {};
  buffers_.metadata.Clear();
  kernels_.clear();
  timed_begin_ = timed_end_ = 0;
  input_moves_.clear();
  output_moves_.clear();
  writes_ = reads_ = {};
  if (!alone || !runtime_->kernels_reach_host()) return;
  if (bytes <= kMovedBytes && TensorCopies::InFewPieces(tensors.inputs, kMoves)) {
    copies_->AddMoves(tensors.inputs, input_moves_);
  }
  if (TensorCopies::BytesOf(tensors.outputs) <= kMovedBytes &&
      TensorCopies::InFewPieces(tensors.outputs, kMoves)) {
    copies_->AddMoves(tensors.outputs, output_moves_);
  }
  one_sequence_ = !input_moves_.empty() && !output_moves_.empty() &&
                  launch.gate.ready.word == nullptr && launch.page_writes.empty() &&
                  launch.page_reads.empty();
}

// Returns true for a small output of a launch with a signal, if the waiting client does not need it
// first.
bool LaunchRecording::CopiedBySignal(const Launch& launch, const HostOutput& out) {
  const bool signals = launch.gate.ready.word != nullptr || !launch.signals.empty();
  const int64_t bytes = out.rows * out.row_bytes;
  if (!signals || !out.private_to_caller || out.rows != 1 || bytes > kSignalCopyBytes ||
      signal_copy_.bytes > 0 || !runtime_->kernels_reach_host() || !Reaches(out.host, bytes)) {
    return false;
  }
  signal_copy_ = {AddressOf(out.host), AddressOf(out.device), bytes};
  return true;
}

absl::Status LaunchRecording::AddKernelBytes(Function function, const LaunchShape& shape,
                                             const void* args, size_t bytes) {
  if (kernels_.size() == kernels_.capacity()) {
    return absl::ResourceExhaustedError(absl::StrCat("launch kernels: limit ", kernels_.size()));
  }
  PendingKernel& kernel = kernels_.emplace_back();
  kernel.function = function;
  kernel.shape = shape;
  if (std::exchange(follows_gate_, false)) {
    kernel.shape.overlap_predecessor = shape.overlap_gate && shape.grid_x <= kBlocksNextToGate;
  }
  kernel.arg_bytes = static_cast<uint32_t>(bytes);
  std::memcpy(kernel.args.data(), args, bytes);
  return absl::OkStatus();
}

uint64_t* LaunchRecording::digests() const {
  return runtime_->kernels_reach_host() ? reinterpret_cast<uint64_t*>(buffers_.digests_back.data())
                                        : buffers_.digests.As<uint64_t>();
}

}  // namespace mla::kernels::hip
