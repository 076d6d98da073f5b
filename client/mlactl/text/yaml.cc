#include "client/mlactl/text/yaml.h"

#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

using Json = nlohmann::ordered_json;

bool IsPlainKey(const std::string& key) {
  if (key.empty() || (key[0] >= '0' && key[0] <= '9')) return false;
  for (const char c : key) {
    if (!(c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'))) {
      return false;
    }
  }
  // YAML 1.1 takes these for truth values and nothing.
  for (const char* word : {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}) {
    if (key == word) return false;
  }
  return true;
}

void Write(const Json& value, const std::string& indent, bool in_list, std::string* out) {
  if ((!value.is_object() && !value.is_array()) || value.empty()) {
    *out += value.dump() + "\n";
    return;
  }
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    // The first line of an element stands next to its dash.
    if (!(first && in_list)) *out += indent;
    first = false;
    if (value.is_array()) {
      *out += "- ";
      Write(item, indent + "  ", /*in_list=*/true, out);
      continue;
    }
    *out += (IsPlainKey(key) ? key : Json(key).dump()) + ":";
    const bool nested = (item.is_object() || item.is_array()) && !item.empty();
    *out += nested ? "\n" : " ";
    Write(item, indent + "  ", /*in_list=*/false, out);
  }
}

}  // namespace

std::string YamlOfJson(const std::string& json) {
  const Json value = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return json;
  std::string out;
  Write(value, "", /*in_list=*/false, &out);
  return out;
}

}  // namespace mla::mlactl
