// Texts made from the table of keys: help, reference, example file, values.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "server/config/config.h"

namespace mla::server {
namespace {

// Appends the text in lines of at most 100 columns, each of which begins with the prefix.
void Wrap(const std::string& text, const std::string& prefix, std::string* out) {
  std::string line;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(text, ' '))) {
    if (line.size() + word.size() > 90) {
      absl::StrAppend(out, prefix, line, "\n");
      line.clear();
    }
    absl::StrAppend(&line, " ", word);
  }
  absl::StrAppend(out, prefix, line, "\n");
}

// Its names on the command line, each between quotes.
std::string FlagNames(const ConfigKey& key, const char* quote) {
  const std::string name = FlagName(key);
  std::string names = absl::StrCat(quote, name, quote);
  if (*key.short_flag == '\0') return names;
  return absl::StrCat(names, ", ", quote, key.short_flag, quote);
}

}  // namespace

const char* TypeName(ConfigType type) {
  switch (type) {
    case ConfigType::kBool:
      return "bool";
    case ConfigType::kInt:
      return "count";
    case ConfigType::kBytes:
      return "bytes";
    case ConfigType::kMillis:
      return "milliseconds";
    case ConfigType::kDouble:
      return "ratio";
    case ConfigType::kString:
      return "text";
    case ConfigType::kChoice:
      return "choice";
  }
  return "";
}

std::string PrintConfig(const LoadedConfig& loaded) {
  std::string out;
  for (const ConfigKey& key : ConfigKeys()) {
    absl::StrAppendFormat(&out, "%-30s = %-24s # %s\n", key.name, ValueText(key, loaded.config),
                          loaded.origin.at(key.name));
  }
  for (const auto& [name, quota] : loaded.config.tenants.quotas) {
    const std::string prefix = absl::StrCat(kTenantQuotas, name, ".");
    for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
      const auto& bound = quota.bounds[row.resource];
      if (!bound) continue;
      absl::StrAppendFormat(&out, "%-30s = %-24s # file\n", prefix + row.name,
                            row.bytes ? BytesText(*bound) : absl::StrCat(*bound));
    }
    if (quota.weight) absl::StrAppendFormat(&out, "%sweight = %d # file\n", prefix, *quota.weight);
  }
  return out;
}

std::string HelpText() {
  std::string out =
      "mla-server: attention over a paged latent KV cache, served over gRPC.\n\n"
      "usage: mla-server [--config FILE] [--KEY=VALUE ...]\n\n"
      "  --config FILE      YAML file; environment and flags override it\n"
      "  --check-config     list every fault of the configuration and exit\n"
      "  --print-config     show every value and where it comes from, and exit\n"
      "  --print-example    write a file with every key at its default, and exit\n"
      "  --print-reference  write the reference of all keys as Markdown, and exit\n"
      "  --version          show the version and exit\n"
      "  --help             show this and exit\n\n"
      "Keys. As an environment variable --kv-cache-bytes is MLA_KV_CACHE_BYTES, in the file\n"
      "kv_cache.bytes; a flag outweighs the environment, and that the file. Sizes take KiB, MiB, "
      "GiB\n"
      "and TiB. Keys marked with * are taken over by a running server, on SIGHUP or when the file\n"
      "changes.\n\n";
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string value = ValueText(key, Config()), range = RangeText(key);
    absl::StrAppend(&out, "  ", FlagNames(key, ""), "=", TypeName(key.type),
                    IsLive(key) ? "  *\n" : "\n");
    Wrap(absl::StrCat(key.meaning, " (", range, range.empty() ? "" : "; ",
                      value.empty() ? "empty" : value, " by default)"),
         "     ", &out);
  }
  return out;
}

// Follows the keys of tenants in the example file: quotas have names that the table does not know.
constexpr char kExampleQuotas[] =
    "  # Bounds of tenants by name, in place of those above.\n"
    "  # quotas:\n"
    "  #   research: {kv_bytes: 32GiB, sequences: 200, weight: 2}\n";

std::string ExampleYaml() {
  std::string out =
      "# Every key at its default. Environment names and flags override this file:\n"
      "# kv_cache.bytes is MLA_KV_CACHE_BYTES and --kv-cache-bytes.\n";
  std::string group;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::vector<std::string> parts = absl::StrSplit(key.name, absl::MaxSplits('.', 1));
    if (parts[0] != group) {
      if (group == "tenants") absl::StrAppend(&out, kExampleQuotas);
      absl::StrAppend(&out, "\n", parts[0], ":\n");
    }
    group = parts[0];
    std::string comment = key.meaning;
    if (const std::string range = RangeText(key); !range.empty()) {
      absl::StrAppend(&comment, " (", range, ")");
    }
    Wrap(comment, "  #", &out);
    const std::string value = ValueText(key, Config());
    const bool quoted = key.type == ConfigType::kString || key.type == ConfigType::kChoice;
    absl::StrAppend(&out, "  ", parts[1], ": ", quoted ? absl::StrCat("\"", value, "\"") : value,
                    "\n");
  }
  return out;
}

std::string ReferenceMarkdown() {
  std::string out;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string value = ValueText(key, Config());
    const std::string range = RangeText(key);
    absl::StrAppend(&out, "### `", key.name, "`\n\n", key.meaning, " ", key.edge, "\n\n",
                    "- type: ", TypeName(key.type), range.empty() ? "" : "; " + range,
                    "\n- default: ", value.empty() ? "empty" : "`" + value + "`", "\n- flag ",
                    FlagNames(key, "`"), "; environment `", EnvironmentName(key),
                    IsLive(key) ? "`\n- a running server takes a new value over\n\n" : "`\n\n");
  }
  return out;
}

}  // namespace mla::server
