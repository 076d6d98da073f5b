// Configuration files: any bytes are read, or refused with a place in the file.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/config/config.h"
#include "server/config/yaml_file.h"
#include "tests/fuzz/harness/target.h"

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

}  // namespace

FuzzTarget TargetUnderTest() {
  return {.seeds = {"kv_cache:\n  bytes: 2GiB\n  page_size: 16\nlimits:\n  max_models: 3\n",
                    "log: {format: json, level: \"info\"}\n# end\n", server::ExampleYaml()},
          .executions = 2000};
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckYaml({reinterpret_cast<const char*>(data), size}));
  return 0;
}
