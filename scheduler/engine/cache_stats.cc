#include "scheduler/engine/cache_stats.h"

#include <cstddef>

namespace mla::scheduler {

void AddCacheStats(const kvcache::KvCache& cache, EngineStats* stats) {
  const kvcache::KvCacheStats figures = cache.stats();
  stats->kv_bytes_total = figures.bytes_total;
  stats->kv_bytes_used = figures.bytes_used;
  stats->page_groups_used = figures.groups_used;
  stats->page_groups_free = figures.groups_free;
  stats->page_groups_shared = figures.groups_shared;
  stats->page_groups_pinned = figures.groups_pinned;
  stats->kv_bytes_pinned = figures.bytes_pinned;
  stats->page_groups_taken = figures.allocations;
  const auto freed = [&figures](kvcache::Freed why) {
    return figures.freed[static_cast<size_t>(why)];
  };
  stats->page_groups_released = freed(kvcache::Freed::kReleased);
  stats->page_groups_expired = freed(kvcache::Freed::kExpired);
  stats->page_groups_truncated = freed(kvcache::Freed::kTruncated);
  stats->page_groups_uncommitted = freed(kvcache::Freed::kUncommitted);
  stats->page_groups_evicted = freed(kvcache::Freed::kEvicted);
  stats->page_groups_cached = figures.groups_cached;
  stats->kv_bytes_cached = figures.bytes_cached;
  stats->page_groups_kept = cache.prefixes().pinned_groups();
  stats->kv_bytes_kept = cache.prefixes().pinned_bytes();
  stats->prefix = cache.prefix_stats();
  stats->copies_on_write = figures.copies_on_write;
  stats->kv_bytes_copied = figures.bytes_copied;
  stats->page_groups_scrubbed = figures.scrubs;
}

}  // namespace mla::scheduler
