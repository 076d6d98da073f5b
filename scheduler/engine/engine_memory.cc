// Memory that an engine takes, before there is one.
#include <algorithm>

#include "scheduler/engine.h"
#include "scheduler/launching/launch_sizes.h"

namespace mla::scheduler {
namespace {

// A pool whose size is not configured is a multiple of this.
constexpr int64_t kKvCacheStep = 1 << 20;

}  // namespace

EngineBytes Engine::CountBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const kernels::BackendLimits sizes = BackendLimitsOf(limits, backend);
  EngineBytes bytes;
  bytes.host = LaunchHostBytes(limits, backend) + backend.HostWorkspaceSize(sizes);
  (backend.Info().unified_memory ? bytes.host : bytes.device) += backend.WorkspaceSize(sizes);
  return bytes;
}

int64_t Engine::KvCacheBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const int64_t memory = backend.Info().memory_bytes;
  if (memory <= 0) return Limits().kv_cache_bytes;
  // Some workspaces grow with the pool, so they are counted for the largest there could be.
  Limits most = limits;
  most.kv_cache_bytes = std::min(memory, kMostKvCacheBytes);
  const int64_t rest = backend.WorkspaceSize(BackendLimitsOf(most, backend)) - most.kv_cache_bytes;
  return std::clamp((memory - rest) / kKvCacheStep * kKvCacheStep, kKvCacheStep, kMostKvCacheBytes);
}

}  // namespace mla::scheduler
