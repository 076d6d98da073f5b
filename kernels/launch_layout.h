// Gives the tensors of one launch their places in a slot's memory and lists what is to be copied.
//
// Where memory is unified, a tensor in one piece is used in place, and a tensor in parts gets a
// place in the workspace. Elsewhere inputs, outputs and workspace have a region each. In launches
// with few output bytes, outputs and inputs that are read once are used in place if kernels reach
// them.
//
// Owned by the builder of the launch; the lists stay valid until Clear. One thread. Reserve
// allocates the lists; no other call does until they are full.
#ifndef MLA_KERNELS_LAUNCH_LAYOUT_H_
#define MLA_KERNELS_LAUNCH_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/types/launch.h"

namespace mla::kernels {

inline constexpr int64_t kLaunchAlignment = 256;  // bytes

// Columns of a row-major matrix, with a host buffer of their own: row r of the matrix is row r of
// every part, one after the other. A part's rows are contiguous.
struct InputPart {
  const void* host;
  int64_t row_bytes;
  bool shared = false;  // as in HostInput
};
struct OutputPart {
  void* host;  // null: these columns are not needed
  int64_t row_bytes;
  bool shared = false;
};

class LaunchLayout final {
 public:
  LaunchLayout() = default;
  // Makes the layout of slot `slot` of a configured backend.
  LaunchLayout(AttentionBackend& backend, int32_t slot)
      : LaunchLayout(backend.Info().unified_memory, backend.Memory(slot)) {
    if (!unified_) backend_ = &backend;
  }
  LaunchLayout(bool unified, const SlotMemory& memory) : unified_(unified), memory_(memory) {}

  void Reserve(size_t inputs, size_t outputs) {
    inputs_.reserve(inputs);
    outputs_.reserve(outputs);
  }
  void Clear();
  // Announces the bytes of all outputs together, before the first tensor is placed. Without this
  // call no tensor is used in place.
  void ExpectOutputs(int64_t bytes) {
    in_place_ = backend_ != nullptr && bytes <= backend_->Info().in_place_bytes;
  }

  // Returns where the launch sees the tensor. RESOURCE_EXHAUSTED names the region that is full.
  absl::StatusOr<const void*> Input(const void* host, int64_t bytes);
  // Does what Input does, for a tensor that the launch reads once.
  absl::StatusOr<const void*> InputReadOnce(const void* host, int64_t bytes);
  absl::StatusOr<void*> Output(void* host, int64_t bytes);
  // Does what Output does, for a small tensor that is private to the caller (HostOutput). Kernels
  // write it to device memory and it is copied later, because kernels that write to host memory
  // wait for it.
  absl::StatusOr<void*> PrivateOutput(void* host, int64_t bytes);
  // Do what Input and Output do, for tensors in the backend's shared device memory, which are used
  // in place.
  const void* SharedInput(const void* at, int64_t bytes);
  void* SharedOutput(void* at, int64_t bytes);
  // Copies `rows` rows that the launch writes at `from`, `pitch` bytes apart, to shared memory at
  // `to` when they are complete.
  void CopyToShared(void* to, const void* from, int64_t row_bytes, int64_t rows, int64_t pitch);
  // Do what Input and Output do, for a matrix of `rows` rows whose columns lie in parts in host
  // memory. The launch sees it in one piece.
  absl::StatusOr<const void*> InputParts(int64_t rows, std::span<const InputPart> parts);
  absl::StatusOr<void*> OutputParts(int64_t rows, std::span<const OutputPart> parts);
  absl::StatusOr<void*> Workspace(int64_t bytes);

  // Return the tensors placed since Clear.
  std::span<const HostInput> inputs() const { return inputs_; }
  std::span<const HostOutput> outputs() const { return outputs_; }

 private:
  absl::StatusOr<std::byte*> Take(std::span<std::byte> region, int64_t& used, int64_t bytes,
                                  const char* what);
  absl::StatusOr<std::byte*> TakeInput(int64_t bytes);
  absl::StatusOr<std::byte*> TakeOutput(int64_t bytes);

  bool InPlace(const void* host, int64_t bytes) const {
    return in_place_ && backend_->InPlace(host, bytes);
  }

  bool unified_ = true;
  const AttentionBackend* backend_ = nullptr;  // null: nothing is used in place, or everything is
  bool in_place_ = false;                      // true if tensors that kernels reach are used in
                                               // place
  SlotMemory memory_;
  int64_t inputs_used_ = 0, outputs_used_ = 0, workspace_used_ = 0;
  std::vector<HostInput> inputs_;
  std::vector<HostOutput> outputs_;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_LAUNCH_LAYOUT_H_
