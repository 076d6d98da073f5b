// Keeps the weights of the EXPANDED and PROJECTED profiles in device memory: a slot for each model
// and layer. A slot has up to two pieces of memory, one with W_UK of all heads and then W_UV, and
// one with W_UQ and then W_O, in bf16 or in e4m3 with its scales (kernels/projected_weights.h).
// Rows of the latter are padded with zeros to a multiple of kRowProductDepth.
//
// Everything happens on the stream of the kernels, so launches submitted before a call see the
// weights from before it. Slots lie in one arena. If none of its gaps is large enough, slots move.
//
// Threading: as the backend's, one thread at a time. Calls block until their copies have ended.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_STORE_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_STORE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/device_state/weight_arena.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "kernels/projected_weights.h"

namespace mla::kernels::hip {

class WeightStore final {
 public:
  // Without Configure the store has no slots. If the architecture has weight_panels, weights of
  // dims that the expanded form has kernels for are kept in panels (weight_panels.h).
  absl::Status Configure(GpuRuntime* runtime, Stream stream, const BackendLimits& limits,
                         const ArchTraits& arch);

  // Does what AttentionBackend::LoadWeights does. `scratch` is device memory that is unused now.
  absl::Status Load(int32_t slot, const Geometry& geometry, int32_t head_begin, int32_t head_end,
                    const Bf16* w_uk, const Bf16* w_uv, const DeviceBuffer& scratch);
  // As AttentionBackend::LoadProjected.
  absl::Status LoadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, const void* weights,
                             const DeviceBuffer& scratch);
  // Does what AttentionBackend::ReadWeights and ReadProjected do.
  absl::Status Read(int32_t slot, const Geometry& geometry, int32_t head, Bf16* w_uk, Bf16* w_uv);
  absl::Status ReadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, void* weights);
  absl::Status Free(int32_t slot);
  // True after a move of slots has failed halfway: no weights may be read any more.
  bool torn() const { return torn_; }

  bool InPanels(const Geometry& geometry) const;
  bool Holds(int32_t slot, int32_t head_begin, int32_t heads) const;
  // One matrix of PROJECTED on the device. Without all heads no address is set; else `weights`, or
  // `codes` with `scales`.
  struct HeldMatrix {
    ProjectedMatrix shape;
    const uint16_t* weights = nullptr;
    const uint8_t* codes = nullptr;
    const float* scales = nullptr;
    bool whole() const { return weights != nullptr || codes != nullptr; }
  };
  HeldMatrix Projected(int32_t slot, ProjectedPart part) const;
  // Return device addresses of the weights of a slot that has some.
  const uint16_t* UkOf(int32_t slot) const { return Published(slot); }
  const uint16_t* UvOf(int32_t slot) const {
    return Published(slot + static_cast<int32_t>(slots_.size()));
  }
  // Return device arrays of these addresses, by slot.
  const uint16_t* const* w_uk() const { return pointers_.As<const uint16_t*>(); }
  const uint16_t* const* w_uv() const { return w_uk() + slots_.size(); }

 private:
  const uint16_t* Published(int32_t index) const {
    return reinterpret_cast<uint16_t* const*>(pointers_host_.data())[index];
  }
  struct Slot {
    Geometry geometry;
    std::vector<bool> loaded;  // by head
    bool used() const { return !loaded.empty(); }
  };
  struct ProjectedSlot {
    Geometry geometry;
    ProjectedShape shape;
    std::vector<bool> loaded[kProjectedParts];  // by head
    bool used() const { return shape.present(); }
  };
  absl::Status CheckSlot(int32_t slot) const;
  absl::Status CheckRoom(int64_t bytes) const;
  // Returns the index in the arena of a slot's weights of PROJECTED. Its other weights have the
  // slot's index.
  int32_t ExtentOfProjected(int32_t slot) const {
    return slot + static_cast<int32_t>(slots_.size());
  }
  absl::Status Place(int32_t extent, int64_t bytes, const DeviceBuffer& scratch);
  void Drop(int32_t extent);
  absl::Status PlaceProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                              const DeviceBuffer& scratch);
  DevicePtr MatrixAt(int32_t slot, ProjectedPart part) const;
  // The rows of one head in a slot's weights of PROJECTED, `pitch` bytes apart. REQUIRES: the slot
  // has such weights.
  struct HeadRows {
    DevicePtr at = 0;
    int64_t pitch = 0, row_bytes = 0, rows = 0;
  };
  HeadRows RowsOf(int32_t slot, ProjectedPart part, int32_t head) const;
  // Copy these rows through pinned memory, from or to rows without gaps.
  absl::Status CopyRows(const HeadRows& target, const void* from);
  absl::Status CopyRowsOut(const HeadRows& from, void* to);
  // The scales of one head, [rows, row_bytes / 4]. REQUIRES: the slot has e4m3.
  HeadRows ScalesOf(int32_t slot, ProjectedPart part, int32_t head) const;
  // Copy a head's scales from or to its bytes (kernels/projected_weights.h), which have one for
  // each block.
  absl::Status CopyScales(int32_t slot, ProjectedPart part, int32_t head, const void* from);
  absl::Status CopyScalesOut(int32_t slot, ProjectedPart part, int32_t head, void* out);
  // Calls visit(block) for the scales of a head in the order of ScalesOf.
  template <class Visit>
  void ForEachScale(const ProjectedSlot& held, ProjectedPart part, const WeightWindow& window,
                    const Visit& visit) const;
  static absl::Status CheckRow(int64_t row_bytes);
  // Copies one matrix [rows, columns] a head, contiguously from `target` on.
  absl::Status CopyMatrices(DevicePtr target, const Bf16* from, int32_t heads, int32_t rows,
                            int32_t columns, bool in_panels);
  // Undoes CopyMatrices for one matrix.
  absl::Status CopyMatrixOut(DevicePtr from, Bf16* out, int32_t rows, int32_t columns,
                             bool in_panels);
  absl::Status Compact(const DeviceBuffer& scratch);
  absl::Status Publish();

  GpuRuntime* runtime_ = nullptr;
  Stream stream_ = nullptr;
  DeviceBuffer memory_, pointers_;
  PinnedBuffer pointers_host_, packed_;
  const ArchTraits* arch_ = nullptr;
  std::vector<Slot> slots_;               // as in the arena
  std::vector<ProjectedSlot> projected_;  // in the arena after the slots
  WeightArena arena_;                     // extents in memory_
  bool torn_ = false;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_STORE_H_
