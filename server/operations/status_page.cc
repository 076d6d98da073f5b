#include "server/operations/status_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace mla::server {
namespace {

using nlohmann::ordered_json;

// Light and dark follow the browser. Widths of bars are the only styles outside this sheet.
constexpr char kStyle[] = R"css(
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5c6978;--line:#dfe4ea;--bar:#2f6fde;
--track:#e6ebf2;--good:#1a7f4b;--bad:#c2342b;--warn:#b26a00;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1b212a;--ink:#e6ebf1;--soft:#98a5b5;
--line:#2c3541;--bar:#5b93f5;--track:#29323e;--good:#4cc38a;--bad:#ff7b72;--warn:#e3a13c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1.5rem;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.3rem 1rem;margin-bottom:1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1rem;margin:0 0 .6rem}
.badge{color:#fff;background:var(--bad);border-radius:1rem;padding:.05rem .7rem;font-weight:600}
.badge.good{background:var(--good)}
@media(prefers-color-scheme:dark){.badge{color:#10151b}}
small,.soft{color:var(--soft)}small{font-size:.82rem}
.alert{border-left:4px solid var(--bad)}
.card,.alert{background:var(--card);border-radius:.5rem;padding:1rem;margin-bottom:1rem;
overflow-x:auto;border-top:1px solid var(--line);border-right:1px solid var(--line);
border-bottom:1px solid var(--line)}.card{border-left:1px solid var(--line)}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(14rem,45%),1fr));
margin-bottom:1rem}.grid .card{margin:0;padding:.8rem 1rem}
.value{font-size:1.45rem;font-weight:600;white-space:nowrap}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-top:1px solid var(--line);
vertical-align:top;font-weight:normal}thead th{border:0;color:var(--soft);font-size:.82rem}
th[scope=row],td{overflow-wrap:anywhere}th[scope=row]{min-width:7rem}td{min-width:5rem}
td .track{margin-top:.25rem}
.track{background:var(--track);border-radius:.3rem;height:.5rem;min-width:5rem;overflow:hidden}
.fill{background:var(--bar);height:100%}.fill.warn{background:var(--warn)}
.fill.full{background:var(--bad)}.pool .track{height:1.1rem;margin:.2rem 0 .3rem}
.meter{display:grid;grid-template-columns:11rem 1fr 15rem;gap:.2rem 1rem;align-items:center;
padding:.25rem 0}.meter .text{text-align:right}
@media(max-width:40rem){.meter{grid-template-columns:1fr auto}.meter .track{grid-column:1/3;
grid-row:2}}
details table{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.85rem}
summary{cursor:pointer;font-weight:600}a{color:var(--bar)}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem}
)css";

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string TextOf(const StatusValue& value) {
  if (const auto* number = std::get_if<uint64_t>(&value)) return absl::StrCat(*number);
  if (const auto* is = std::get_if<bool>(&value)) return *is ? "yes" : "no";
  return std::get<std::string>(value);
}

std::string KeyOf(const std::string& name) { return absl::StrReplaceAll(name, {{" ", "_"}}); }

double PercentOf(const StatusMeter& meter) {
  if (meter.bound == 0) return 0;
  return std::min(100.0 * static_cast<double>(meter.used) / static_cast<double>(meter.bound),
                  100.0);
}

std::string Amount(const StatusMeter& meter, uint64_t amount) {
  const auto number = static_cast<double>(amount);
  return meter.bytes ? BytesText(number) : NumberText(number);
}

std::string UseText(const StatusMeter& meter) {
  std::string text = Amount(meter, meter.used);
  if (meter.bound != 0) absl::StrAppend(&text, " of ", Amount(meter, meter.bound));
  return text;
}

std::string Bar(const StatusMeter& meter) {
  if (meter.bound == 0) return "";
  const double percent = PercentOf(meter);
  const char* level = percent >= 90 ? " full" : percent >= 75 ? " warn" : "";
  return absl::StrFormat(
      "<div class=\"track\" role=\"meter\" aria-label=\"%s\" aria-valuemin=\"0\" "
      "aria-valuemax=\"100\" aria-valuenow=\"%.0f\"><div class=\"fill%s\" style=\"width:%.1f%%\">"
      "</div></div>",
      Escape(meter.name), percent, level, percent);
}

std::string Header(const StatusPage& page) {
  std::string html = absl::StrCat(
      "<header><h1>mla-server</h1><span class=\"badge", page.good ? " good" : "", "\">",
      Escape(page.state), "</span><span>up ", DurationText(page.uptime_seconds), "</span><span>",
      Escape(page.backend), "</span><small>version ", Escape(page.version), " · every ",
      kStatusRefreshSeconds, " s</small></header>\n");
  if (!page.message.empty()) {
    absl::StrAppend(&html, "<p class=\"alert\">", Escape(page.message), "</p>\n");
  }
  return html;
}

std::string Tiles(const StatusPage& page) {
  std::string html = "<section class=\"grid\">\n";
  for (const StatusTile& tile : page.tiles) {
    absl::StrAppend(&html, "<div class=\"card\"><small>", Escape(tile.name),
                    "</small><div class=\"value\">", Escape(tile.value), "</div><small>",
                    Escape(tile.note), "</small></div>\n");
  }
  return html + "</section>\n";
}

std::string Meters(const StatusPage& page) {
  if (page.meters.empty()) return "";
  const StatusMeter& pool = page.meters.front();
  std::string html = absl::StrFormat(
      "<section class=\"card pool\"><h2>%s <span class=\"soft\">%.0f %%</span></h2>%s"
      "<div>%s <small>%s</small></div></section>\n<section class=\"card\"><h2>Limits</h2>\n",
      Escape(pool.name), PercentOf(pool), Bar(pool), Escape(UseText(pool)), Escape(pool.note));
  for (size_t i = 1; i < page.meters.size(); ++i) {
    const StatusMeter& meter = page.meters[i];
    absl::StrAppend(&html, "<div class=\"meter\"><span>", Escape(meter.name), "</span>", Bar(meter),
                    "<span class=\"text\">", Escape(UseText(meter)), " <small>", Escape(meter.note),
                    "</small></span></div>\n");
  }
  return html + "</section>\n";
}

std::string Tenants(const StatusPage& page) {
  std::string html = "<section class=\"card\"><h2>Tenants</h2>";
  if (page.tenants.empty()) return html + "<p class=\"soft\">none has called yet</p></section>\n";
  absl::StrAppend(&html, "<table><thead><tr><th scope=\"col\">name</th>");
  for (const StatusMeter& meter : page.tenants.front().meters) {
    absl::StrAppend(&html, "<th scope=\"col\">", Escape(meter.name), "</th>");
  }
  absl::StrAppend(&html, "</tr></thead><tbody>\n");
  const size_t shown = std::min(page.tenants.size(), kMaxTenantRows);
  for (size_t i = 0; i < shown; ++i) {
    absl::StrAppend(&html, "<tr><th scope=\"row\">", Escape(page.tenants[i].name), "</th>");
    for (const StatusMeter& meter : page.tenants[i].meters) {
      absl::StrAppend(&html, "<td>", Escape(UseText(meter)), Bar(meter), "</td>");
    }
    absl::StrAppend(&html, "</tr>\n");
  }
  absl::StrAppend(&html, "</tbody></table>");
  const uint64_t more = page.tenants_left_out + (page.tenants.size() - shown);
  if (more > 0) absl::StrAppend(&html, "<p class=\"soft\">and ", more, " more</p>");
  return html + "</section>\n";
}

std::string Models(const StatusPage& page) {
  std::string html = "<section class=\"card\"><h2>Models</h2>";
  if (page.models.empty()) return html + "<p class=\"soft\">none is registered</p></section>\n";
  absl::StrAppend(
      &html,
      "<table><thead><tr><th scope=\"col\">model</th><th scope=\"col\">tenant</th>"
      "<th scope=\"col\">shape</th><th scope=\"col\">layers</th><th scope=\"col\">rows a "
      "page</th></tr></thead><tbody>\n");
  for (const StatusModel& model : page.models) {
    absl::StrAppend(&html, "<tr><th scope=\"row\">", Escape(model.name), "</th><td>",
                    Escape(model.tenant), "</td><td>", Escape(model.shape), "</td><td>",
                    model.layers, "</td><td>", model.page_rows, "</td></tr>\n");
  }
  return html + "</tbody></table></section>\n";
}

std::string Details(const StatusPage& page) {
  std::string html;
  for (const StatusSection& section : page.sections) {
    absl::StrAppend(&html, "<details class=\"card\"><summary>", Escape(section.title),
                    "</summary><table>\n");
    for (const auto& [name, value] : section.rows) {
      absl::StrAppend(&html, "<tr><th scope=\"row\">", Escape(name), "</th><td>",
                      Escape(TextOf(value)), "</td></tr>\n");
    }
    absl::StrAppend(&html, "</table></details>\n");
  }
  absl::StrAppend(&html, "<nav>");
  for (const auto& [address, text] : page.links) {
    absl::StrAppend(&html, "<a href=\"", Escape(address), "\">", Escape(text), "</a>");
  }
  return html + "</nav>\n";
}

ordered_json MeterJson(const StatusMeter& meter) {
  ordered_json json;
  json["used"] = meter.used;
  if (meter.bound != 0) json["bound"] = meter.bound;
  json["unit"] = meter.bytes ? "bytes" : "count";
  return json;
}

}  // namespace

std::string StatusHtml(const StatusPage& page) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
      "http-equiv=\"refresh\""
      " content=\"",
      kStatusRefreshSeconds,
      "\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>",
      Escape(page.state), " · mla-server</title><style>", kStyle, "</style></head><body>\n",
      Header(page), "<p class=\"soft\">", Escape(page.window), "</p>", Tiles(page), Meters(page),
      Tenants(page), Models(page), Details(page), "</body></html>\n");
}

std::string StatusJson(const StatusPage& page) {
  ordered_json out;
  for (const StatusSection& section : page.sections) {
    ordered_json rows;
    for (const auto& [name, value] : section.rows) {
      std::visit([&, key = KeyOf(name)](const auto& plain) { rows[key] = plain; }, value);
    }
    out[KeyOf(section.title)] = std::move(rows);
  }
  out["uptime_seconds"] = page.uptime_seconds;
  for (const StatusMeter& meter : page.meters) out["limits"][KeyOf(meter.name)] = MeterJson(meter);
  out["tenants"] = ordered_json::array();
  for (const StatusTenant& tenant : page.tenants) {
    ordered_json row;
    row["name"] = tenant.name;
    for (const StatusMeter& meter : tenant.meters) row[KeyOf(meter.name)] = MeterJson(meter);
    out["tenants"].push_back(std::move(row));
  }
  out["models"] = ordered_json::array();
  for (const StatusModel& model : page.models) {
    out["models"].push_back({{"tenant", model.tenant},
                             {"name", model.name},
                             {"shape", model.shape},
                             {"layers", model.layers},
                             {"page_rows", model.page_rows}});
  }
  return out.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace mla::server
