// The same values as YAML.
#ifndef MLA_CLIENT_MLACTL_TEXT_YAML_H_
#define MLA_CLIENT_MLACTL_TEXT_YAML_H_

#include <string>

namespace mla::mlactl {

// A JSON text as a YAML document of the same values, in the same order. Texts are quoted as in
// JSON, which YAML reads alike. A text that is no JSON comes back as it is.
std::string YamlOfJson(const std::string& json);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TEXT_YAML_H_
