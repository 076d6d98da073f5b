#include "scheduler/limits.h"

#include "absl/strings/str_cat.h"

namespace mla::scheduler {

absl::Status CheckLimits(const Limits& limits) {
  const struct {
    const char* key;
    int64_t got, low, high;
  } ranges[] = {
      {"kv_cache.bytes", limits.kv_cache_bytes, 1 << 16, kMostKvCacheBytes},
      {"kv_cache.page_size", limits.default_page_size, 1, 4096},
      {"limits.max_sequences", limits.max_sequences, 1, 1 << 20},
      {"limits.max_sequence_rows", limits.max_sequence_rows, 1, 1 << 30},
      {"limits.max_pages_per_sequence", limits.max_pages_per_sequence, 1, 1 << 28},
      {"limits.prefix_tokens", limits.prefix_tokens, 1, 1 << 30},
      {"kv_cache.pinned_percent", limits.pinned_percent, 0, 90},
      {"kv_cache.tenant_pinned_percent", limits.tenant_pinned_percent, 0, 90},
      {"tiers.host_bytes", limits.host_tier_bytes, 0, kMostKvCacheBytes},
      {"tiers.file_bytes", limits.file_tier_bytes, 0, kMostKvCacheBytes},
      {"tiers.low_percent", limits.tier_low_percent, 0, 100},
      {"tiers.high_percent", limits.tier_high_percent, limits.tier_low_percent, 100},
      {"tiers.file_hits", limits.tier_file_hits, 0, 1 << 20},
      {"tiers.tenant_percent", limits.tier_tenant_percent, 1, 100},
      {"tiers.wait_ms", limits.tier_wait_ms, 0, 60'000},
      {"limits.max_models", limits.max_models, 1, 1024},
      {"limits.max_layers", limits.max_layers, 1, 4096},
      {"limits.max_heads", limits.max_heads, 1, 4096},
      {"limits.max_row_dim", limits.max_row_dim, 1, 8192},
      {"limits.max_v_dim", limits.max_v_dim, 0, 8192},
      {"limits.max_hidden_size", limits.max_hidden_size, 1, 1 << 16},
      {"limits.max_top_k", limits.max_top_k, 0, 1 << 16},
      {"limits.max_tail_bytes", limits.max_tail_bytes, 0, 1 << 30},
      {"limits.tail_bytes", limits.tail_bytes, 0, kMostKvCacheBytes},
      {"limits.weights_bytes", limits.weights_bytes, 0, int64_t{1} << 40},
      {"limits.max_step_rows", limits.max_step_rows, 1, 1 << 24},
      {"limits.max_step_sequences", limits.max_step_sequences, 1, limits.max_sequences},
      {"limits.max_open_steps", limits.max_open_steps, 1, 1 << 16},
      {"limits.max_participants", limits.max_participants, 1, 1 << 10},
      {"limits.max_tenants", limits.max_tenants, 1, 1 << 20},
      {"limits.queue_requests", limits.queue_requests, 1, 1 << 20},
      {"limits.launch_rows", limits.launch_rows, 1, 1 << 20},
      {"limits.launch_packed_rows", limits.launch_packed_rows, limits.max_heads, 1 << 26},
      {"limits.launch_requests", limits.launch_requests, 1, 1 << 20},
      {"limits.prefill_rows", limits.prefill_rows, 1, limits.launch_rows},
      {"limits.launch_ms", limits.launch_ms, 1, 60'000},
      {"limits.decode_rows", limits.decode_rows, 1, limits.launch_rows},
      {"limits.sequence_lease_ms", limits.sequence_lease_ms, 1, limits.max_lease_ms},
      {"limits.max_lease_ms", limits.max_lease_ms, 1, int64_t{1} << 40},
      {"limits.model_lease_ms", limits.model_lease_ms, 0, limits.max_lease_ms},
      {"limits.model_yield_ms", limits.model_yield_ms, 0, int64_t{1} << 40},
      {"limits.step_lease_ms", limits.step_lease_ms, 1, limits.max_lease_ms},
      {"limits.max_step_lease_ms", limits.max_step_lease_ms, 1, int64_t{1} << 40},
      {"limits.slice_wait_us", limits.slice_wait_us, 0, limits.queue_ms * 1000},
      {"limits.kv_wait_ms", limits.kv_wait_ms, 0, limits.max_lease_ms},
      {"limits.ahead_us", limits.ahead_us, 0, limits.launch_ms * 1000},
      {"limits.queue_ms", limits.queue_ms, 1, limits.max_lease_ms},
      {"limits.max_name_bytes", limits.max_name_bytes, 1, 1 << 16},
  };
  for (const auto& r : ranges) {
    if (r.got >= r.low && r.got <= r.high) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(r.key, ": got ", r.got, ", must be ", r.low, "..", r.high));
  }
  return absl::OkStatus();
}

}  // namespace mla::scheduler
