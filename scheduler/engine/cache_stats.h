// The figures of the KV cache among an engine's statistics.
#ifndef MLA_SCHEDULER_ENGINE_CACHE_STATS_H_
#define MLA_SCHEDULER_ENGINE_CACHE_STATS_H_

#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {

// Sets every figure of `stats` that is about pages, their bytes or the prefix cache. The figures of
// slower tiers stay as they are. Call it with the engine's role.
void AddCacheStats(const kvcache::KvCache& cache, EngineStats* stats);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_CACHE_STATS_H_
