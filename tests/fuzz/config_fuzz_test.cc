// Configuration files and flags: any bytes are read or refused with a place, and what passes the
// check is a configuration that the engine takes.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/config.h"
#include "server/yaml_file.h"
#include "tests/fuzz/fuzzer.h"

namespace mla::fuzz {
namespace {

std::string CheckYaml(const std::string& text) {
  const server::YamlDocument document = server::ParseYaml(text, "fuzz.yaml");
  for (const std::string& fault : document.faults) {
    if (!absl::StartsWith(fault, "fuzz.yaml:")) return "a fault without its place: " + fault;
  }
  for (const server::YamlValue& value : document.values) {
    if (value.line < 1) return absl::StrCat(value.key, ": line ", value.line);
  }
  return "";
}

// Lines are flags, or environment names where they hold no dash.
std::string CheckFlags(const std::string& text) {
  std::vector<std::string> flags;
  std::map<std::string, std::string> environment;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    // Files are CheckYaml's.
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
  // What is left of a device, and of memory for weights, is known at start only.
  if (limits.kv_cache_bytes == 0) limits.kv_cache_bytes = 1 << 16;
  if (limits.weights_bytes == server::Config::kChooseWeights) limits.weights_bytes = 0;
  const absl::Status taken = scheduler::CheckLimits(limits);
  if (!taken.ok()) return absl::StrCat("passed, but the engine says ", taken.ToString());
  return server::PrintConfig(loaded).empty() ? "nothing to print" : "";
}

TEST(ConfigFuzz, YamlIsReadOrRefusedWithItsPlace) {
  FuzzOptions options;
  options.name = "yaml";
  options.executions = 2000;
  options.seeds = {"kv_cache:\n  bytes: 2GiB\n  page_size: 16\nlimits:\n  max_models: 3\n",
                   "log: {format: json, level: \"info\"}\n# end\n", server::ExampleYaml()};
  const FuzzResult result = Fuzz(options, CheckYaml);
  EXPECT_EQ(result.violation, "");
  RecordProperty("executions", std::to_string(result.executions));
}

TEST(ConfigFuzz, FlagsThatPassAreTakenByTheEngine) {
  FuzzOptions options;
  options.name = "flags";
  options.executions = 500;
  options.seeds = {"--listen=127.0.0.1:1\n--limits-max-heads=64",
                   "MLA_KV_CACHE_BYTES=2GiB\nMLA_LIMITS_QUEUE_MS=1000\n--backend\ncpu",
                   "--limits-launch-rows=8192\n--limits-prefill-rows=100\n--deterministic",
                   "--limits-max-lease-ms=100000\n--limits-step-lease-ms=100",
                   "--wire-message-bytes=1MiB\n--shm-ring-entries=64\n--no-shm-enabled"};
  const FuzzResult result = Fuzz(options, CheckFlags);
  EXPECT_EQ(result.violation, "");
  RecordProperty("executions", std::to_string(result.executions));
}

}  // namespace
}  // namespace mla::fuzz
