#include <chrono>
#include <cstdint>
#include <memory>

#include "base/status_macros.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/hip/present_devices.h"

namespace mla::kernels::hip {
namespace {

HipBackendOptions OptionsOf(HipBackendOptions base, Vendor vendor, const BackendOptions& from) {
  base.vendor = vendor;
  if (base.libraries.empty()) base.libraries = RuntimeLibraries(vendor, from.gpu_runtime_library);
  if (from.gpu_graphs == "on") base.graphs = GraphUse::kOn;
  if (from.gpu_graphs == "off") base.graphs = GraphUse::kOff;
  base.self_test_options.most = std::chrono::milliseconds(from.gpu_self_test_ms);
  base.self_test_options.on_part = from.on_self_test_part;
  base.device = from.device;
  base.memory_fraction = from.gpu_memory_fraction;
  base.expanded_workspace_bytes = from.gpu_expanded_workspace_bytes;
  base.shared_bytes = from.gpu_shared_bytes;
  base.watchdog_ms = from.gpu_watchdog_ms;
  return base;
}

}  // namespace

absl::Status RegisterGpuBackends(BackendRegistry& registry, const HipBackendOptions& base) {
  const auto row = [&base](const char* name, int32_t rank, Vendor vendor) {
    return BackendRow{
        name, rank,
        [vendor,
         base](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
          if (options.deterministic) {
            return absl::UnimplementedError(
                "backend.deterministic: got true, must be false: the cuts and kernels of a GPU's "
                "launch depend on all of its requests; the CPU backend has it");
          }
          MLA_ASSIGN_OR_RETURN(auto backend, HipBackend::Create(OptionsOf(base, vendor, options)));
          return std::unique_ptr<AttentionBackend>(std::move(backend));
        },
        [vendor] { return PresentDevices(vendor); }};
  };
  MLA_RETURN_IF_ERROR(registry.Add(row("hip", 200, Vendor::kAmd)));
  return registry.Add(row("cuda", 190, Vendor::kNvidia));
}

}  // namespace mla::kernels::hip
