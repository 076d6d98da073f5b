// The status page of the operations port: one plain HTML table page without scripts, and the same
// figures as JSON.
#ifndef MLA_SERVER_STATUS_PAGE_H_
#define MLA_SERVER_STATUS_PAGE_H_

#include <string>
#include <utility>
#include <vector>

namespace mla::server {

struct StatusSection {
  std::string title;
  std::vector<std::pair<std::string, std::string>> rows;
};

std::string StatusHtml(const std::vector<StatusSection>& sections);
std::string StatusJson(const std::vector<StatusSection>& sections);

}  // namespace mla::server

#endif  // MLA_SERVER_STATUS_PAGE_H_
