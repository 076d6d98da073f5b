#include "server/preflight.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "kernels/hip/runtime/runtime_report.h"
#include "scheduler/engine.h"
#include "server/backends.h"
#include "server/connections/listeners.h"
#include "server/connections/tls_files.h"
#include "server/process/memory_check.h"
#include "server/process/socket_files.h"

namespace mla::server {

int64_t DefaultWeightsBytes(int64_t memory_bytes) {
  constexpr int64_t kMost = int64_t{2} << 30, kShare = 8, kStep = 1 << 20;
  return std::min(kMost, memory_bytes / kShare / kStep * kStep);
}

void ChooseSizes(const kernels::AttentionBackend& backend, Config* config) {
  scheduler::Limits& limits = config->limits;
  if (limits.weights_bytes == Config::kChooseWeights) {
    const int64_t of_device = backend.Info().memory_bytes;  // 0: the host's
    limits.weights_bytes = DefaultWeightsBytes(of_device > 0 ? of_device : AvailableMemory());
  }
  if (limits.kv_cache_bytes == 0) {
    limits.kv_cache_bytes = scheduler::Engine::KvCacheBytes(limits, backend);
  }
}

absl::Status CheckHostMemory(const Config& config, const kernels::AttentionBackend& backend) {
  const scheduler::EngineBytes bytes = scheduler::Engine::CountBytes(config.limits, backend);
  const bool shared = !ShmSocketPath(config.shm, ServedUnixPath(config)).empty();
  return CheckMemory({{"engine", bytes.host},
                      {"staging", config.wire.staging_bytes},
                      {"shared", shared ? config.shm.total_bytes : 0}},
                     AvailableMemory());
}

std::vector<std::string> Preflight(const Config& config) {
  std::vector<std::string> faults;
  const auto note = [&](const absl::Status& status) {
    if (!status.ok()) faults.emplace_back(status.message());
  };
  if (!config.tls.cert.empty()) note(LoadTls(config.tls, std::time(nullptr)).status());
  const std::string unix_path = ServedUnixPath(config);
  if (!unix_path.empty())
    note(CheckSocketPath("server.unix_path", unix_path, config.listen.open_folder, geteuid()));
  const std::string shm_path = ShmSocketPath(config.shm, unix_path);
  if (!shm_path.empty())
    note(CheckSocketPath("shm.path", shm_path, config.listen.open_folder, geteuid()));
  if (!config.listen.socket_group.empty()) note(FindGroup(config.listen.socket_group).status());
  const auto choice = AllBackends().Select(config.backend, config.backend_options);
  if (!choice.ok()) {
    faults.push_back("backend.name: " + std::string(choice.status().message()));
    return faults;
  }
  Config sized = config;
  ChooseSizes(*choice->backend, &sized);
  note(CheckHostMemory(sized, *choice->backend));
  return faults;
}

std::vector<std::string> DescribeGpus(const Config& config) {
  namespace hip = kernels::hip;
  std::vector<std::string> lines;
  for (const auto& [backend, vendor] :
       {std::pair("hip", hip::Vendor::kAmd), std::pair("cuda", hip::Vendor::kNvidia)}) {
    const std::string& wanted = config.backend;
    if (wanted != "auto" && wanted != kernels::kAnyGpu && wanted != backend) continue;
    const std::vector<std::string> more = hip::DescribeRuntime(
        vendor, hip::RuntimeLibraries(vendor, config.backend_options.gpu_runtime_library),
        hip::BuiltInKernelImages());
    lines.insert(lines.end(), more.begin(), more.end());
  }
  return lines;
}

}  // namespace mla::server
