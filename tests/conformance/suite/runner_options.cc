#include "tests/conformance/suite/runner_options.h"

namespace mla::conformance {

kernels::BackendLimits LimitsOf(const RunnerOptions& options) {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = options.kv_pool_bytes;
  limits.page_table_entries = options.page_table_entries;
  limits.weights_bytes = options.weights_bytes;
  limits.weights_slots = options.weights_slots;
  limits.launch_slots = 2;
  limits.launch_requests = 64;
  limits.launch_rows = 8192;
  limits.launch_packed_rows = 131072;
  limits.partial_rows = options.partial_rows;
  limits.max_o_dim = 512;
  limits.max_top_k = 1;  // makes backends allocate memory for lists
  limits.staging_in_bytes = options.staging_bytes;
  limits.staging_out_bytes = options.staging_bytes;
  limits.slot_workspace_bytes = options.slot_workspace_bytes;
  limits.work_items = 200000;
  limits.reduce_tiles = 100000;
  limits.reduce_partials = 200000;
  limits.round_items = kRoundItems;
  limits.round_expansions = kRoundExpansions;
  limits.max_geometry = {128, 512, 64, 192, 256};
  return limits;
}

}  // namespace mla::conformance
