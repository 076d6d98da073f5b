// Copies the tensors of a slot's launches between host memory and the slot's memory.
//
// Tensors in a pinned range or in shared device memory are "direct": the device copies them itself.
// Other tensors are
// "staged": the host copies them as well, through the slot's pinned regions. Tensors that kernels
// use in place are not copied, and their memory stays pinned until End.
//
// Threading: one thread at a time, like the slot. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_SLOT_TENSOR_COPIES_H_
#define MLA_KERNELS_HIP_SLOT_TENSOR_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/types/launch.h"

namespace mla::kernels::hip {

// One copy of `bytes` bytes that a kernel makes, between device memory and any memory that kernels
// reach.
struct TensorMove {
  DevicePtr to, from;
  int64_t bytes;
};

// LaunchTensors names the tensors that the slot copies, or keeps pinned if they are in place.
struct LaunchTensors {
  std::span<const HostInput> inputs;
  std::span<const HostOutput> outputs;
};

class TensorCopies {
 public:
  // Makes regions of these sizes, for launches of at most `limit` inputs and as many outputs.
  static absl::StatusOr<TensorCopies> Create(GpuRuntime* runtime,
                                             std::shared_ptr<PinnedRanges> pinned,
                                             int64_t input_bytes, int64_t output_bytes,
                                             size_t limit);

  const StagedRegion& input() const { return input_; }
  const StagedRegion& output() const { return output_; }
  int64_t copied_bytes() const { return copied_bytes_; }  // total copied by the host

  // Returns true if the device reaches these bytes, and keeps them pinned until End. Returns false
  // also if as many pieces are held as Create allows.
  bool Reaches(const void* host, int64_t bytes);
  void End();
  // Keeps memory that kernels use in place pinned. INTERNAL if it is not pinned.
  absl::Status HoldInPlace(const LaunchTensors& tensors);

  // BytesOf returns the bytes of the tensors that are copied. InFewPieces returns true if they need
  // at most `most` moves: one a tensor, or one a row if its rows lie apart.
  static int64_t BytesOf(std::span<const HostInput> inputs);
  static int64_t BytesOf(std::span<const HostOutput> outputs);
  static bool InFewPieces(std::span<const HostInput> inputs, size_t most);
  static bool InFewPieces(std::span<const HostOutput> outputs, size_t most);
  // Adds the copies that kernels make instead of the calls below. Staged inputs are staged here.
  // Staged outputs reach the caller by HandOver.
  void AddMoves(std::span<const HostInput> inputs, std::vector<TensorMove>& moves);
  void AddMoves(std::span<const HostOutput> outputs, std::vector<TensorMove>& moves);

  // Stages the inputs that are not direct and enqueues their copy. Returns true if there are any.
  absl::StatusOr<bool> EnqueueStaged(std::span<const HostInput> inputs, Stream stream);
  // Enqueues copies of the direct inputs; call it after EnqueueStaged. Returns true if there are
  // any.
  absl::StatusOr<bool> EnqueueDirect(std::span<const HostInput> inputs, Stream stream);
  // FindDirect finds out which of the launch's outputs are direct. It must come before the next
  // three calls.
  void FindDirect(std::span<const HostOutput> outputs);
  absl::Status EnqueueStaged(std::span<const HostOutput> outputs, Stream stream);
  absl::Status EnqueueDirect(std::span<const HostOutput> outputs, Stream stream);
  // Passes staged outputs to the caller. REQUIRES: their copy has ended.
  void HandOver(std::span<const HostOutput> outputs);

 private:
  TensorCopies(GpuRuntime* runtime, std::shared_ptr<PinnedRanges> pinned)
      : runtime_(runtime), pinned_(std::move(pinned)) {}
  // Copies the tensor into the staged region, with the row distance of the device, and returns its
  // offset there.
  int64_t Stage(const HostInput& in);
  absl::Status Copy(const HostInput& in, Stream stream);
  absl::Status Copy(const HostOutput& out, Stream stream);

  GpuRuntime* runtime_;
  std::shared_ptr<PinnedRanges> pinned_;
  std::vector<PinnedRanges::Id> reached_;  // no duplicates
  StagedRegion input_, output_;
  std::vector<bool> direct_in_, direct_out_;  // by position in the launch's inputs and outputs
  int64_t copied_bytes_ = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SLOT_TENSOR_COPIES_H_
