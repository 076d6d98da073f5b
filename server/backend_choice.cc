#include "server/backend_choice.h"

#include <chrono>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "server/backends.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

// Logs the parts of a slow self-test at info. Most GPUs finish all parts in a second or two, and
// need no such lines.
void LogSelfTestPart(std::string_view part, std::chrono::milliseconds so_far) {
  constexpr auto kQuick = std::chrono::seconds(5);
  Log(so_far < kQuick ? LogLevel::kDebug : LogLevel::kInfo, "self_test",
      {{"part", std::string(part)}, {"so_far_ms", so_far.count()}});
}

}  // namespace

absl::StatusOr<kernels::BackendChoice> ChooseBackend(const Config& config,
                                                     const kernels::BackendRegistry* registry) {
  kernels::BackendOptions options = config.backend_options;
  options.gpu_shared_bytes = config.shm.device_bytes;
  options.on_self_test_part = LogSelfTestPart;
  return registry != nullptr ? registry->Select(config.backend, options)
                             : AllBackends().Select(config.backend, options);
}

void LogSelection(std::span<const kernels::BackendCandidate> candidates) {
  for (const kernels::BackendCandidate& candidate : candidates) {
    Log(LogLevel::kInfo, "backend",
        {{"name", candidate.name},
         {"rank", candidate.rank},
         {"chosen", candidate.chosen},
         {"reason", candidate.reason}});
    if (candidate.unused_hardware.empty()) continue;
    Log(LogLevel::kWarning, "gpu_unused",
        {{"backend", candidate.name},
         {"machine_has", candidate.unused_hardware},
         {"reason", candidate.reason}});
  }
}

void LogBackend(const kernels::BackendInfo& backend) {
  Log(LogLevel::kInfo, "fp8_compute", {{"in_force", backend.fp8_compute}});
  for (const kernels::BackendNote& note : backend.notes) {
    Log(LogLevel::kInfo, "backend_note", {{"about", note.name}, {"text", note.text}});
  }
}

std::string UnusedGpus(std::span<const kernels::BackendCandidate> candidates) {
  std::string lines;
  for (const kernels::BackendCandidate& candidate : candidates) {
    if (candidate.unused_hardware.empty()) continue;
    absl::StrAppend(&lines, "GPU not used: this machine has ", candidate.unused_hardware,
                    "; backend ", candidate.name, ": ", candidate.reason, "\n");
  }
  return lines;
}

}  // namespace mla::server
