// Executes work items of a plan on one thread, merges partial tiles, and runs the projections.
//
// An item is a tile (query rows x heads) and a range of KV rows. Its packed rows are processed in
// groups that fit the scratch memory, and within a group in blocks of kTileRows. KV rows are
// processed in chunks and tiles:
//
//   pack the group's queries
//   for each chunk of KV rows that some row sees:   absorbed: rows stay in their pages
//                                                   expanded: K, V = rows x W_UK, W_UV
//     for each block, tile: S^T = K Q^T; online softmax; O = alpha O + P V
//   write O / l and the LSE to the output, or to the partial buffers when the tile is split
//
// In sparse attention an item has one query row, and a chunk has the KV rows that a range of its
// index list names.
//
// The rows of a split tile are merged in shares, each by one thread, in the order of the plan.
// Threading: const; one thread per scratch memory. Nothing allocates.
#ifndef MLA_KERNELS_CPU_ITEMS_ITEM_RUNNER_H_
#define MLA_KERNELS_CPU_ITEMS_ITEM_RUNNER_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/items/run_layout.h"
#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/types/attention_params.h"

namespace mla::kernels::cpu {

// Packed W_UK / W_UV of a slot, all heads of the model; see weights.h.
struct PackedWeights {
  const std::byte* heads = nullptr;
};

// Partial results of split tiles: normalised output rows and their LSE, by partial row.
struct PartialBuffers {
  float* o = nullptr;
  float* lse = nullptr;
  int64_t o_ld = 0;  // floats between rows of o
};

struct RunContext {
  const KernelSet* kernels = nullptr;
  const AttentionParams* params = nullptr;
  RunLayout layout;
  PoolView pool;
  PartialBuffers partials;
};

// `weights` belong to the item's segment; unused in the absorbed form.
void AttendItem(const RunContext& context, const WorkInfo& work, const PackedWeights& weights,
                std::byte* scratch);

// Merges share `part` of `parts` of the rows of reduce tile `tile` into its final output.
void MergeTile(const RunContext& context, int32_t tile, int32_t part, int32_t parts);

// Rows [row_begin, row_end) of one head of a record, at most kTileRows of them.
struct ProjectionContext {
  const KernelSet* kernels = nullptr;
  Geometry geometry;
  bool absorb = true;
  DType in = DType::kBf16;
  DType out = DType::kBf16;
  const FragmentedInput* fragments = nullptr;  // the record's input if it lies in fragments, else
                                               // null
};
void ProjectBlock(const ProjectionContext& context, const ProjectionRecord& record,
                  const PackedWeights& weights, int32_t head, int32_t row_begin, int32_t row_end,
                  std::byte* scratch);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_ITEM_RUNNER_H_
