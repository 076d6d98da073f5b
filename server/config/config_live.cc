// Declares which keys of the configuration a running server can reload.
#include <algorithm>
#include <string>
#include <string_view>

#include "server/config/config.h"

namespace mla::server {
namespace {

// These keys can be reloaded in addition to the default bounds of tenants. All others size memory,
// threads or sockets at the start.
constexpr std::string_view kLiveKeys[] = {
    "server.operators",          "server.plain_operators",  "server.drain_deadline_ms",
    "server.unhealthy_after_ms", "server.restart_after_ms", "log.level",
    "limits.sequence_lease_ms",  "limits.model_lease_ms",   "limits.step_lease_ms",
};
constexpr std::string_view kTenantKeys = "tenants.";
constexpr std::string_view kTenantMetrics = "tenants.metrics";  // rows are made at the start

// Texts of all quotas by name, to compare.
std::string QuotasText(const Config& config) {
  LoadedConfig shown;
  shown.config.tenants.quotas = config.tenants.quotas;
  for (const ConfigKey& key : ConfigKeys()) shown.origin[key.name] = "";
  const std::string text = PrintConfig(shown);
  const size_t begin = text.find(kTenantQuotas);
  return begin == std::string::npos ? "" : text.substr(begin);
}

}  // namespace

bool IsLive(const ConfigKey& key) {
  const std::string_view name = key.name;
  if (name.starts_with(kTenantKeys)) return name != kTenantMetrics;
  return std::find(std::begin(kLiveKeys), std::end(kLiveKeys), name) != std::end(kLiveKeys);
}

ConfigChanges ChangesOf(const Config& running, const Config& read) {
  ConfigChanges changes;
  for (const ConfigKey& key : ConfigKeys()) {
    if (ValueText(key, running) == ValueText(key, read)) continue;
    (IsLive(key) ? changes.live : changes.fixed).emplace_back(key.name);
  }
  if (QuotasText(running) != QuotasText(read)) changes.live.emplace_back("tenants.quotas");
  return changes;
}

}  // namespace mla::server
