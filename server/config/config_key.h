// Makes rows of the table of configuration keys, by type. Only for the files that make the table.
#ifndef MLA_SERVER_CONFIG_CONFIG_KEY_H_
#define MLA_SERVER_CONFIG_CONFIG_KEY_H_

#include <string>
#include <vector>

#include "server/config/config.h"

namespace mla::server {

inline constexpr double kTiB = 1099511627776.0;
inline constexpr double kDayMs = 86400000;

#define MLA_SLOT(member) [](Config& c) -> ConfigSlot { return &c.member; }

inline ConfigKey Bool(const char* name, const char* meaning, const char* edge,
                      ConfigSlot (*slot)(Config&), const char* short_flag = "") {
  return {name, ConfigType::kBool, 0, 1, "", meaning, edge, short_flag, slot};
}
inline ConfigKey Int(const char* name, double min, double max, const char* meaning,
                     const char* edge, ConfigSlot (*slot)(Config&)) {
  return {name, ConfigType::kInt, min, max, "", meaning, edge, "", slot};
}
inline ConfigKey Bytes(const char* name, double min, double max, const char* meaning,
                       const char* edge, ConfigSlot (*slot)(Config&)) {
  return {name, ConfigType::kBytes, min, max, "", meaning, edge, "", slot};
}
inline ConfigKey Millis(const char* name, double min, double max, const char* meaning,
                        const char* edge, ConfigSlot (*slot)(Config&)) {
  return {name, ConfigType::kMillis, min, max, "", meaning, edge, "", slot};
}
inline ConfigKey Double(const char* name, double min, double max, const char* meaning,
                        const char* edge, ConfigSlot (*slot)(Config&)) {
  return {name, ConfigType::kDouble, min, max, "", meaning, edge, "", slot};
}
inline ConfigKey Text(const char* name, const char* meaning, const char* edge,
                      ConfigSlot (*slot)(Config&), const char* short_flag = "") {
  return {name, ConfigType::kString, 0, 0, "", meaning, edge, short_flag, slot};
}
inline ConfigKey Choice(const char* name, const char* choices, const char* meaning,
                        const char* edge, ConfigSlot (*slot)(Config&),
                        const char* short_flag = "") {
  return {name, ConfigType::kChoice, 0, 0, choices, meaning, edge, short_flag, slot};
}

// Says what a tenant's bound is by default, and what happens to requests that exceed it.
std::string TenantBoundText(const scheduler::ResourceRow& row);
// Adds keys of the sections checkpoint and tiers.
void AddCacheKeys(std::vector<ConfigKey>* keys);
// Adds the keys of section gpu.
void AddGpuKeys(std::vector<ConfigKey>* keys);
// AddTracingKeys adds the keys of section tracing. CheckTracing checks the rules that they obey
// together with others.
void AddTracingKeys(std::vector<ConfigKey>* keys);
void CheckTracing(const Config& config, std::vector<std::string>* faults);
// AddUcxKeys adds the keys of section ucx. CheckUcx checks the rules that involve several of them.
void AddUcxKeys(std::vector<ConfigKey>* keys);
void CheckUcx(const Config& config, std::vector<std::string>* faults);

}  // namespace mla::server

#endif  // MLA_SERVER_CONFIG_CONFIG_KEY_H_
