// Base of every backend in host memory: it holds the pool, the workspaces and the weights, and
// checks and tracks launches. A derived class says which shapes it supports and executes launches.
//
// Memory is unified: page tables, and tensors in one piece, are used where the host has them.
// Submit gathers tensors in parts into the slot's workspace, and Wait scatters outputs in parts.
// The KV pool is a sparse mapping that holds rows exactly in their format, never repacked.
//
// Threading: as AttentionBackend demands (one thread at a time); derived classes may execute on
// threads of their own between Submit and the end of Wait.
#ifndef MLA_KERNELS_HOST_MEMORY_HOST_BACKEND_H_
#define MLA_KERNELS_HOST_MEMORY_HOST_BACKEND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/host_memory/mapped_memory.h"

namespace mla::kernels {

// Addresses KV rows: the base of the pool, and the page tables into it.
struct PoolView {
  std::byte* base = nullptr;
  int64_t bytes = 0;
  const uint32_t* page_tables = nullptr;

  // Returns the first byte of row `position` of a sequence. All arithmetic has 64 bits.
  std::byte* Row(int64_t page_table, int64_t layer_offset, int64_t row_stride, int32_t page_size,
                 int32_t position) const {
    const int64_t granule = page_tables[page_table + position / page_size];
    return base + granule * kPageGranuleBytes + layer_offset + (position % page_size) * row_stride;
  }
};

// Query row q_row of the segment sees KV rows [0, VisibleRows).
inline int32_t VisibleRows(const SegmentRecord& segment, int32_t q_row) {
  if (segment.causal == 0) return segment.kv_rows;
  const int32_t seen = segment.kv_rows - segment.q_rows + q_row + 1;
  return seen < 0 ? 0 : seen;
}

// Returns how many KV rows the query row attends to, counted as places of a plan.
inline int32_t PlacesOf(const AttentionParams& params, int32_t segment_index, int32_t q_row) {
  const SegmentRecord& segment = params.segments[static_cast<size_t>(segment_index)];
  const int32_t visible = VisibleRows(segment, q_row);
  if (params.desc.attention == AttentionKind::kDense) return visible;
  const int32_t* const begin = segment.list_begin;
  const int32_t listed = begin == nullptr ? 0 : begin[q_row + 1] - begin[q_row];
  if (params.desc.attention == AttentionKind::kSparse) return listed;
  const WindowRecord& window = params.windows[static_cast<size_t>(segment_index)];
  const int32_t entries = begin == nullptr ? WholeEntries(window, visible) : listed;
  return WindowRows(window, visible) + entries;
}

// The kind of the 8-bit floats of pools in host memory.
inline constexpr Fp8Kind kHostFp8 = Fp8Kind::kE4m3Fn;

// Copies rows [row_begin, row_end) of the record into their pages, or compares them with the rows
// stored there, in the encoding of kernels/formats/kv_format.h.
void AppendRows(const PoolView& pool, const AppendRecord& record, int32_t row_begin,
                int32_t row_end);

// Carries out one range; its source does not overlap its target.
void WritePageRange(const PoolView& pool, const PageRange& range);

class HostBackend : public AttentionBackend {
 public:
  absl::Status CanRun(const AttentionDesc& desc) const override;
  int64_t WorkspaceSize(const BackendLimits& limits) const override;
  absl::Status Configure(const BackendLimits& limits) override;
  absl::Status Healthy() const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(size_t bytes) override;
  absl::Status LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                           int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) override;
  absl::Status LoadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, const void* weights) override;
  absl::Status ReadWeights(int32_t slot, const Geometry& geometry, int32_t head, Bf16* w_uk,
                           Bf16* w_uv) override;
  absl::Status ReadProjected(int32_t slot, const Geometry& geometry, const ProjectedShape& shape,
                             ProjectedPart part, int32_t head, void* weights) override;
  absl::Status FreeWeights(int32_t slot) override;

  SlotMemory Memory(int32_t slot) override;
  absl::Status Submit(int32_t slot, const Launch& launch) override;
  bool Done(int32_t slot) override;
  absl::StatusOr<int64_t> Wait(int32_t slot) override;

 protected:
  // The weights of one slot, with room for every head of the model and filled by any number of
  // LoadWeights calls. Heads not loaded yet read as zero, and the checks refuse them.
  struct WeightSlot {
    bool used = false;
    Geometry geometry;
    std::vector<bool> loaded;  // by head
    MappedMemory memory;       // head after head; layout of one head chosen by the derived class
    // Weights of PROJECTED for all heads; the derived class chooses their layout.
    ProjectedShape shape;
    Geometry projected_geometry;
    std::vector<bool> projected_heads[kProjectedParts];  // loaded ones
    MappedMemory projected;
    int64_t charged_bytes = 0;
  };

  // Returns the bytes that Configure takes for the derived class, in addition to the common memory.
  virtual int64_t OwnWorkspaceSize(const BackendLimits& limits) const = 0;
  virtual absl::Status ConfigureOwn(const BackendLimits& limits) = 0;
  // Returns the bytes of repacked weights, proportional to the heads; and the repacking, into
  // zeroed memory of that size. Each head is packed independently, so that LoadWeights may bring
  // ranges of heads.
  virtual int64_t PackedWeightBytes(const Geometry& geometry, int32_t heads) const = 0;
  virtual void PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk,
                           const Bf16* w_uv, std::byte* packed) const = 0;
  // Undoes PackWeights for one head, whose packed weights begin at `packed`.
  virtual void UnpackWeights(const Geometry& geometry, const std::byte* packed, Bf16* w_uk,
                             Bf16* w_uv) const = 0;
  // The same for the weights of PROJECTED of all heads, into which PackProjected packs one head.
  // They are called only if Info().projects.
  virtual int64_t PackedProjectedBytes(const Geometry&, const ProjectedShape&) const { return 0; }
  virtual void PackProjected(const Geometry&, const ProjectedShape&, ProjectedPart, int32_t,
                             const void*, std::byte*) const {}
  virtual void UnpackProjected(const Geometry&, const ProjectedShape&, ProjectedPart, int32_t,
                               const std::byte*, void*) const {}
  // Refuses attention that exceeds the configured limits or lacks weights.
  virtual absl::Status CheckAttention(const AttentionParams& params) const;
  // Called in submission order. The launch stays unchanged until Finish has returned.
  virtual void Start(int32_t slot, const Launch& launch) = 0;
  virtual bool Finished(int32_t slot) = 0;
  virtual absl::StatusOr<int64_t> Finish(int32_t slot) = 0;

  const BackendLimits& limits() const { return limits_; }
  PoolView Pool(std::span<const uint32_t> page_tables) const;
  const WeightSlot& Weights(int32_t slot) const { return weights_[slot]; }

 private:
  struct Slot {
    const Launch* launch = nullptr;  // the running one
    MappedMemory workspace;
  };

  absl::Status CheckSlot(int32_t slot) const;
  absl::Status Check(const Launch& launch) const;
  absl::Status CheckProjection(const char* part, const Projection& projection) const;
  absl::Status CheckRowProjection(const char* name, const RowProjection& projection,
                                  ProjectedPart part) const;
  absl::Status CheckWeightsSlot(int32_t slot) const;
  // Refuses weights that would exceed the budget.
  absl::Status CheckBudget(int64_t charged) const;
  bool HoldsHeads(int32_t slot, int32_t head_begin, int32_t heads) const;

  bool configured_ = false;
  BackendLimits limits_;
  MappedMemory pool_;
  std::vector<Slot> slots_;
  std::vector<WeightSlot> weights_;
  int64_t weight_bytes_used_ = 0;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_MEMORY_HOST_BACKEND_H_
