// The status page of the operations port: one plain HTML table page without scripts, and the same
// as JSON: numbers are numbers there, and names have underscores for their spaces.
#ifndef MLA_SERVER_STATUS_PAGE_H_
#define MLA_SERVER_STATUS_PAGE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace mla::server {

using StatusValue = std::variant<std::string, uint64_t, bool>;

struct StatusSection {
  std::string title;
  std::vector<std::pair<std::string, StatusValue>> rows;
};

std::string StatusHtml(const std::vector<StatusSection>& sections);
std::string StatusJson(const std::vector<StatusSection>& sections);

}  // namespace mla::server

#endif  // MLA_SERVER_STATUS_PAGE_H_
