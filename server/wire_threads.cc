#include "server/wire_threads.h"

#include <algorithm>

#include "base/usable_cpus.h"

namespace mla::server {

CompletionPollerOptions PollingOf(const Config::Wire& wire, const kernels::BackendInfo& backend) {
  CompletionPollerOptions polling;
  polling.threads = wire.poll_threads;
  polling.spin_us = wire.spin_us >= 0
                        ? wire.spin_us
                        : DefaultSpinMicros(base::UsableCpuCount(), backend.unified_memory);
  return polling;
}

wire::ThreadTeamOptions TeamOf(const Config::Wire& wire, const kernels::BackendInfo& backend) {
  constexpr int32_t kMostByDefault = 4, kCpusPerThread = 4;
  wire::ThreadTeamOptions team;
  team.threads = wire.copy_threads;
  if (team.threads == 0 && !backend.reads_fragments) {
    team.threads = std::min(base::UsableCpuCount() / kCpusPerThread, kMostByDefault);
  }
  team.threads = std::max(team.threads, 1);
  team.spin_us = PollingOf(wire, backend).spin_us;
  return team;
}

}  // namespace mla::server
