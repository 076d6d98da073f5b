// Writes the values of a JSON document as YAML.
#ifndef MLA_CLIENT_MLACTL_TEXT_YAML_H_
#define MLA_CLIENT_MLACTL_TEXT_YAML_H_

#include <string>

namespace mla::mlactl {

// Returns a YAML document with the values of a JSON text, in the same order. Strings keep JSON's
// quotes, which YAML reads in the same way. Returns a text that is not JSON unchanged.
std::string YamlOfJson(const std::string& json);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TEXT_YAML_H_
