// Reads a YAML file of two levels (group: {key: value}) into flat text values with line numbers.
//
// The only place that knows the YAML library. Refuses these, each with a fault that gives the line:
// files above 1 MiB, aliases and anchors, nesting deeper than 8, lists, repeated keys. Throws no
// exceptions.
#ifndef MLA_SERVER_CONFIG_YAML_FILE_H_
#define MLA_SERVER_CONFIG_YAML_FILE_H_

#include <string>
#include <vector>

namespace mla::server {

struct YamlValue {
  std::string key;  // "group.key"
  std::string value;
  int line = 0;  // counted from 1
};

struct YamlDocument {
  std::vector<YamlValue> values;
  std::vector<std::string> faults;  // "path:line: the fault"
};

// `name` appears only in faults.
YamlDocument ParseYaml(const std::string& text, const std::string& name);
YamlDocument ReadYamlFile(const std::string& path);

}  // namespace mla::server

#endif  // MLA_SERVER_CONFIG_YAML_FILE_H_
