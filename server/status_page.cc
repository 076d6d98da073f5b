#include "server/status_page.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace mla::server {
namespace {

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string TextOf(const StatusValue& value) {
  if (const auto* number = std::get_if<uint64_t>(&value)) return absl::StrCat(*number);
  if (const auto* is = std::get_if<bool>(&value)) return *is ? "yes" : "no";
  return std::get<std::string>(value);
}

std::string KeyOf(const std::string& name) { return absl::StrReplaceAll(name, {{" ", "_"}}); }

}  // namespace

std::string StatusHtml(const std::vector<StatusSection>& sections) {
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>mla-server"
      "</title><style>body{font:16px sans-serif;margin:2em;color:#111;background:#fff}"
      "th{text-align:left;font-weight:normal;padding-right:2em}td{font-family:monospace}"
      "caption{text-align:left;font-weight:bold;padding:1em 0 .3em}</style></head><body>\n"
      "<h1>mla-server</h1>\n";
  for (const StatusSection& section : sections) {
    absl::StrAppend(&html, "<table><caption>", Escape(section.title), "</caption>\n");
    for (const auto& [name, value] : section.rows) {
      absl::StrAppend(&html, "<tr><th scope=\"row\">", Escape(name), "</th><td>",
                      Escape(TextOf(value)), "</td></tr>\n");
    }
    absl::StrAppend(&html, "</table>\n");
  }
  return absl::StrCat(html, "</body></html>\n");
}

std::string StatusJson(const std::vector<StatusSection>& sections) {
  nlohmann::ordered_json out;
  for (const StatusSection& section : sections) {
    nlohmann::ordered_json rows;
    for (const auto& [name, value] : section.rows) {
      std::visit([&, key = KeyOf(name)](const auto& plain) { rows[key] = plain; }, value);
    }
    out[KeyOf(section.title)] = std::move(rows);
  }
  return out.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace mla::server
