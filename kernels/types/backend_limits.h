// Sizes for which a backend takes all its memory once, in AttentionBackend::Configure.
#ifndef MLA_KERNELS_TYPES_BACKEND_LIMITS_H_
#define MLA_KERNELS_TYPES_BACKEND_LIMITS_H_

#include <cstdint>

#include "kernels/types/attention_desc.h"

namespace mla::kernels {

// Bounds that size everything at Configure; each comes from the server's limits.
struct BackendLimits {
  int64_t kv_pool_bytes = 0;       // one contiguous pool
  int64_t page_table_entries = 0;  // over all sequences
  int64_t weights_bytes = 0;       // budget of LoadWeights, as bf16 bytes of W_UK and W_UV
  int32_t weights_slots = 0;
  int32_t launch_slots = 2;          // launches being prepared or running at a time
  int32_t launch_requests = 0;       // segment records a launch
  int32_t launch_rows = 0;           // query rows a launch, all requests together
  int64_t launch_packed_rows = 0;    // query rows x heads a launch
  int64_t partial_rows = 0;          // PlanView::partial_rows at most
  int32_t max_o_dim = 0;             // widest output row of any model (kv_lora_rank or v_dim)
  int64_t staging_in_bytes = 0;      // SlotMemory::inputs, where memory is not unified
  int64_t staging_out_bytes = 0;     // SlotMemory::outputs, where memory is not unified
  int64_t slot_workspace_bytes = 0;  // SlotMemory::workspace
  int64_t work_items = 0;            // plan capacity, for device copies of the plan
  int64_t reduce_tiles = 0;
  int64_t reduce_partials = 0;
  int64_t round_items = 0;  // per plan, all rounds together
  int64_t round_expansions = 0;
  int32_t max_top_k = 0;        // entries a row of Launch::selects
  int32_t page_ranges = 4096;   // a launch; also its page writes and page reads
  int32_t digest_parts = 8192;  // a launch's page writes, and its page reads
  int32_t table_ranges = 4096;  // per launch
  Geometry max_geometry;        // every dim at its maximum over all models
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_BACKEND_LIMITS_H_
