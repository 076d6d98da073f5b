// Flags and environment: a configuration that passes the check must be one that the engine accepts.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "scheduler/limits.h"
#include "server/config/config.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

// Lines are flags, or names of environment variables if they hold no dash.
std::string CheckFlags(const std::string& text) {
  std::vector<std::string> flags;
  std::map<std::string, std::string> environment;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    // Skipped because the yaml target reads files.
    if (absl::StrContains(line, "config") || absl::StrContains(line, "CONFIG")) continue;
    const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (absl::StartsWith(line, "MLA_")) {
      environment[parts.first] = parts.second;
    } else {
      flags.emplace_back(line);
    }
  }
  const server::LoadedConfig loaded = server::LoadConfig(flags, environment);
  for (const std::string& fault : loaded.faults) {
    if (fault.empty()) return "a fault without words";
  }
  if (!loaded.faults.empty()) return "";
  scheduler::Limits limits = loaded.config.limits;
  // Free memory of a device, and memory for weights, are known only at start.
  if (limits.kv_cache_bytes == 0) limits.kv_cache_bytes = 1 << 16;
  if (limits.weights_bytes == server::Config::kChooseWeights) limits.weights_bytes = 0;
  const absl::Status taken = scheduler::CheckLimits(limits);
  if (!taken.ok()) return absl::StrCat("passed, but the engine says ", taken.ToString());
  return server::PrintConfig(loaded).empty() ? "nothing to print" : "";
}

}  // namespace

FuzzTarget TargetUnderTest() {
  return {.seeds = {"--listen=127.0.0.1:1\n--limits-max-heads=64",
                    "MLA_KV_CACHE_BYTES=2GiB\nMLA_LIMITS_QUEUE_MS=1000\n--backend\ncpu",
                    "--limits-launch-rows=8192\n--limits-prefill-rows=100\n--deterministic",
                    "--limits-max-lease-ms=100000\n--limits-step-lease-ms=100",
                    "--wire-message-bytes=1MiB\n--shm-ring-entries=64\n--no-shm-enabled"},
          .executions = 500};
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckFlags({reinterpret_cast<const char*>(data), size}));
  return 0;
}
