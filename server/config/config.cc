#include "server/config/config.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <regex>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/config/config_key.h"
#include "server/config/yaml_file.h"

namespace mla::server {
namespace {

struct Suffix {
  const char* text;
  int shift;
};
constexpr size_t kMostNameBytes = 256;           // longest environment name that is examined
constexpr int64_t kLeastKvCacheBytes = 1 << 20;  // with less, hardly any model would get a page
constexpr Suffix kSuffixes[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};

std::string NumberText(const ConfigKey& key, double value) {
  if (key.type == ConfigType::kBytes) return BytesText(static_cast<int64_t>(value));
  if (key.type == ConfigType::kDouble) return absl::StrCat(value);
  return absl::StrCat(static_cast<int64_t>(value));
}

bool ParseBool(const std::string& text, bool* value) {
  if (text == "true" || text == "1" || text == "on" || text == "yes") return *value = true;
  if (text == "false" || text == "0" || text == "off" || text == "no") {
    *value = false;
    return true;
  }
  return false;
}

std::string MustBe(const ConfigKey& key, const std::string& got) {
  return absl::StrCat("got \"", got, "\", must be ", RangeText(key));
}

const ConfigKey* FindKey(const std::string& name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (name == key.name) return &key;
  }
  return nullptr;
}

void Assign(const ConfigKey& key, const std::string& value, const std::string& origin,
            LoadedConfig* loaded) {
  const std::string fault = SetValue(key, value, &loaded->config);
  if (!fault.empty()) {
    loaded->faults.push_back(absl::StrCat(key.name, ": ", fault, " (", origin, ")"));
    return;
  }
  loaded->origin[key.name] = origin;
}

void ApplyFile(const std::string& path, LoadedConfig* loaded) {
  const YamlDocument document = ReadYamlFile(path);
  loaded->faults.insert(loaded->faults.end(), document.faults.begin(), document.faults.end());
  for (const YamlValue& value : document.values) {
    const std::string origin = absl::StrCat("file ", path, ":", value.line);
    if (absl::StartsWith(value.key, kTenantQuotas)) {
      const std::string fault = SetTenantQuota(value.key, value.value, &loaded->config);
      if (!fault.empty()) {
        loaded->faults.push_back(absl::StrCat(value.key, ": ", fault, " (", origin, ")"));
      }
      continue;
    }
    if (const ConfigKey* key = FindKey(value.key)) {
      Assign(*key, value.value, origin, loaded);
    } else {
      loaded->faults.push_back(absl::StrCat(value.key, ": unknown key (", origin, ")"));
    }
  }
}

// Returns true for a name that Kubernetes, or Docker's links, give to the containers of services
// whose own name begins with "mla": MLA_SERVER_SERVICE_HOST, MLA_PORT_50551_TCP_ADDR.
bool IsServiceLink(const std::string& name) {
  static const std::regex link(
      "MLA(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|"
      "PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)");
  return name.size() <= kMostNameBytes && std::regex_match(name, link);
}

void ApplyEnvironment(const std::map<std::string, std::string>& environment, LoadedConfig* loaded) {
  // All but the first are of clients, which may share an environment with the server.
  std::set<std::string> known = {"MLA_CONFIG", "MLA_TARGET", "MLA_CLIENT_LIBRARY", "MLA_SGLANG"};
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name = EnvironmentName(key);
    known.insert(name);
    const auto found = environment.find(name);
    if (found != environment.end()) Assign(key, found->second, "env " + name, loaded);
  }
  for (const auto& [name, value] : environment) {
    // Names that begin with MLA_TEST_ are for test runs, with MLA_CLIENT_ for mlactl and clients.
    if (!absl::StartsWith(name, "MLA_") || absl::StartsWith(name, "MLA_TEST_") ||
        absl::StartsWith(name, "MLA_CLIENT_") || known.count(name) != 0) {
      continue;
    }
    if (IsServiceLink(name)) {
      loaded->service_links.push_back(name);
    } else {
      loaded->faults.push_back(absl::StrCat(name, ": unknown environment name"));
    }
  }
}

struct Flag {
  std::string name;
  std::string value;
  bool has_value = false;
};

Flag SplitFlag(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) return {argument, "", false};
  return {argument.substr(0, equals), argument.substr(equals + 1), true};
}

bool* CommandSlot(const std::string& name, CommandLine* command) {
  if (name == "--check-config") return &command->check_config;
  if (name == "--print-config") return &command->print_config;
  if (name == "--print-example") return &command->print_example;
  if (name == "--print-reference") return &command->print_reference;
  if (name == "--help") return &command->help;
  if (name == "--version") return &command->version;
  return nullptr;
}

const ConfigKey* FindFlag(const std::string& name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (name == FlagName(key) || (*key.short_flag != '\0' && name == key.short_flag)) return &key;
  }
  return nullptr;
}

// Returns the key of `--no-x`, for booleans.
const ConfigKey* FindNegated(const std::string& name) {
  if (!absl::StartsWith(name, "--no-")) return nullptr;
  const ConfigKey* key = FindFlag("--" + name.substr(5));
  return key != nullptr && key->type == ConfigType::kBool ? key : nullptr;
}

struct Assignment {
  const ConfigKey* key;
  std::string value;
  std::string origin;
};

// Splits the command line into commands, assignments and the config file's path.
std::vector<Assignment> ReadFlags(const std::vector<std::string>& arguments, std::string* file,
                                  LoadedConfig* loaded) {
  std::vector<Assignment> assignments;
  for (size_t i = 0; i < arguments.size(); ++i) {
    Flag flag = SplitFlag(arguments[i]);
    const ConfigKey* negated = FindNegated(flag.name);
    if (bool* command = CommandSlot(flag.name, &loaded->command); command && !flag.has_value) {
      *command = true;
      continue;
    }
    if (negated != nullptr && !flag.has_value) {
      assignments.push_back({negated, "false", "flag " + flag.name});
      continue;
    }
    const ConfigKey* key = FindFlag(flag.name);
    if (key == nullptr && flag.name != "--config") {
      loaded->faults.push_back(absl::StrCat(arguments[i], ": unknown flag"));
      continue;
    }
    if (!flag.has_value && key != nullptr && key->type == ConfigType::kBool) {
      flag.value = "true";
    } else if (!flag.has_value) {
      if (i + 1 >= arguments.size()) {
        loaded->faults.push_back(absl::StrCat(flag.name, ": needs a value"));
        continue;
      }
      flag.value = arguments[++i];
    }
    if (key == nullptr) {
      *file = flag.value;
    } else {
      assignments.push_back({key, flag.value, "flag " + flag.name});
    }
  }
  return assignments;
}

// Returns true if `address` is host:port; else adds a fault.
bool CheckAddress(const char* key, const std::string& address, std::vector<std::string>* faults) {
  if (address.empty()) return true;
  const size_t colon = address.rfind(':');
  int32_t port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    faults->push_back(
        absl::StrCat(key, ": got \"", address, "\", must be host:port with a port of 0 .. 65535"));
    return false;
  }
  return true;
}

bool IsAnyHost(const std::string& host) {
  return host == "0.0.0.0" || host == "[::]" || host == "*";
}

// Returns true if both addresses would bind the same port of the same address.
bool SamePort(const std::string& a, const std::string& b) {
  const size_t colon_a = a.rfind(':'), colon_b = b.rfind(':');
  if (colon_a == std::string::npos || colon_b == std::string::npos) return false;
  int32_t port_a = 0, port_b = 0;
  if (!absl::SimpleAtoi(a.substr(colon_a + 1), &port_a) ||
      !absl::SimpleAtoi(b.substr(colon_b + 1), &port_b) || port_a != port_b || port_a == 0) {
    return false;
  }
  std::string host_a = a.substr(0, colon_a), host_b = b.substr(0, colon_b);
  if (host_a == "localhost") host_a = "127.0.0.1";
  if (host_b == "localhost") host_b = "127.0.0.1";
  return host_a == host_b || IsAnyHost(host_a) || IsAnyHost(host_b);
}

void CheckListen(const Config& config, std::vector<std::string>* faults) {
  const Config::Listen& listen = config.listen;
  const bool well_formed = CheckAddress("server.listen", listen.address, faults);
  CheckAddress("ops.listen", config.ops.address, faults);
  if (listen.address.empty() && listen.unix_path.empty()) {
    faults->push_back("server.listen: empty, and server.unix_path is empty too: nothing to serve");
  }
  if (listen.unix_path.size() > 107) {
    faults->push_back(absl::StrCat("server.unix_path: got ", listen.unix_path.size(),
                                   " bytes, at most 107 are possible"));
  }
  if (absl::StrContains(listen.unix_path, ',')) {
    faults->push_back(absl::StrCat("server.unix_path: got \"", listen.unix_path,
                                   "\", must be without a comma: gRPC takes it for two paths"));
  }
  if (SamePort(listen.address, config.ops.address)) {
    faults->push_back(absl::StrCat("ops.listen: got \"", config.ops.address,
                                   "\", must be another port than server.listen"));
  }
  if (config.shm.enabled && config.shm.path != "auto" && config.shm.path == listen.unix_path) {
    faults->push_back("shm.path: must be another path than server.unix_path");
  }
  const std::string& tenant = listen.unix_tenant;
  if (tenant.size() > static_cast<size_t>(config.limits.max_name_bytes) ||
      std::any_of(tenant.begin(), tenant.end(), [](char c) { return c <= 0x20 || c >= 0x7f; })) {
    faults->push_back(absl::StrCat("server.unix_tenant: must be at most ",
                                   config.limits.max_name_bytes, " printable ASCII characters"));
  }
  const Config::Tls& tls = config.tls;
  if (!tls.cert.empty() && !listen.socket_group.empty() && tenant.empty()) {
    faults->push_back(
        "server.socket_group: with tls.cert it needs server.unix_tenant, the tenant of its members "
        "(*: any)");
  }
  if (!tls.client_crl.empty() && tls.client_ca.empty()) {
    faults->push_back("tls.client_crl: needs tls.client_ca");
  }
  const int given = !tls.cert.empty() + !tls.key.empty() + !tls.client_ca.empty();
  if (given != 0 && given != 3) {
    faults->push_back("tls.cert: tls.cert, tls.key and tls.client_ca go together; " +
                      absl::StrCat(given, " of 3 given"));
  }
  if (well_formed && given == 0 && !listen.insecure && !listen.address.empty() &&
      !IsLoopback(listen.address)) {
    faults->push_back(absl::StrCat(
        "server.listen: got \"", listen.address,
        "\", an address beyond loopback needs tls.cert, tls.key and tls.client_ca, or an explicit "
        "server.insecure"));
  }
}

}  // namespace

std::string BytesText(int64_t bytes) {
  for (int i = 3; i >= 0; --i) {
    const int64_t unit = int64_t{1} << kSuffixes[i].shift;
    if (bytes >= unit && bytes % unit == 0) {
      return absl::StrCat(bytes / unit, kSuffixes[i].text);
    }
  }
  return absl::StrCat(bytes);
}

bool ParseBytes(std::string text, int64_t* bytes) {
  int shift = 0;
  for (const Suffix& suffix : kSuffixes) {
    if (!absl::EndsWith(text, suffix.text)) continue;
    text.resize(text.size() - 3);
    shift = suffix.shift;
  }
  int64_t count = 0;
  if (!absl::SimpleAtoi(text, &count)) return false;
  return !__builtin_mul_overflow(count, int64_t{1} << shift, bytes);
}

std::string RangeText(const ConfigKey& key) {
  switch (key.type) {
    case ConfigType::kBool:
      return "true or false";
    case ConfigType::kString:
      return "";
    case ConfigType::kChoice: {
      std::vector<std::string> choices = absl::StrSplit(key.choices, '|');
      for (std::string& choice : choices) {
        if (choice.empty()) choice = "\"\"";
      }
      return absl::StrJoin(choices, ", ");
    }
    default:
      return absl::StrCat(NumberText(key, key.min), " .. ", NumberText(key, key.max));
  }
}

std::string FlagName(const ConfigKey& key) {
  return "--" + absl::StrReplaceAll(key.name, {{".", "-"}, {"_", "-"}});
}

std::string EnvironmentName(const ConfigKey& key) {
  return "MLA_" + absl::AsciiStrToUpper(absl::StrReplaceAll(key.name, {{".", "_"}}));
}

std::string ValueText(const ConfigKey& key, const Config& config) {
  // The slot function takes a mutable config, but only reading follows here.
  const ConfigSlot slot = key.slot(const_cast<Config&>(config));
  if (auto p = std::get_if<bool*>(&slot)) return **p ? "true" : "false";
  if (auto p = std::get_if<std::string*>(&slot)) return **p;
  if (auto p = std::get_if<double*>(&slot)) return absl::StrCat(**p);
  if (auto p = std::get_if<int32_t*>(&slot)) return absl::StrCat(**p);
  const int64_t value = *std::get<int64_t*>(slot);
  return key.type == ConfigType::kBytes ? BytesText(value) : absl::StrCat(value);
}

std::string SetValue(const ConfigKey& key, const std::string& text, Config* config) {
  const ConfigSlot slot = key.slot(*config);
  if (auto p = std::get_if<bool*>(&slot)) return ParseBool(text, *p) ? "" : MustBe(key, text);
  if (auto p = std::get_if<std::string*>(&slot)) {
    if (text.find('\0') != std::string::npos) return "contains a zero byte";
    const std::vector<std::string> choices = absl::StrSplit(key.choices, '|');
    if (key.type == ConfigType::kChoice &&
        std::find(choices.begin(), choices.end(), text) == choices.end()) {
      return MustBe(key, text);
    }
    **p = text;
    return "";
  }
  if (auto p = std::get_if<double*>(&slot)) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !(value >= key.min && value <= key.max)) {
      return MustBe(key, text);
    }
    **p = value;
    return "";
  }
  int64_t value = 0;
  const bool parsed =
      key.type == ConfigType::kBytes ? ParseBytes(text, &value) : absl::SimpleAtoi(text, &value);
  if (!parsed || static_cast<double>(value) < key.min || static_cast<double>(value) > key.max) {
    return MustBe(key, text);
  }
  if (auto p = std::get_if<int32_t*>(&slot)) {
    **p = static_cast<int32_t>(value);
  } else {
    *std::get<int64_t*>(slot) = value;
  }
  return "";
}

bool IsLoopback(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  // A prefix would not do: 127.example.org is an ordinary host name.
  in_addr numeric{};
  if (inet_pton(AF_INET, host.c_str(), &numeric) == 1) return ntohl(numeric.s_addr) >> 24 == 127;
  return host == "localhost" || host == "[::1]";
}

std::string UnixPath(const Config::Listen& listen, const std::string& runtime_folder) {
  if (listen.unix_path != "auto") return listen.unix_path;
  const std::string port = listen.address.substr(listen.address.rfind(':') + 1);
  // A port chosen by the system cannot be announced, because clients could not know it.
  if (listen.address.empty() || port == "0") return "";
  return absl::StrCat(runtime_folder, "/mla-server-", port, ".sock");
}

std::string ShmSocketPath(const Config::Shm& shm, const std::string& unix_path) {
  if (!shm.enabled || unix_path.empty()) return "";
  return shm.path == "auto" ? unix_path + ".shm" : shm.path;
}

namespace {

void CheckTiers(const Config& config, std::vector<std::string>* faults) {
  if (config.tiers.file_path.empty()) return;
  if (config.limits.host_tier_bytes == 0) {
    faults->push_back("tiers.file_path: needs tiers.host_bytes, which rows pass on their way");
  }
  if (config.limits.file_tier_bytes == 0) {
    faults->push_back("tiers.file_path: needs tiers.file_bytes");
  }
}

}  // namespace

void CheckConfig(const Config& config, std::vector<std::string>* faults) {
  CheckListen(config, faults);
  CheckTiers(config, faults);
  CheckTracing(config, faults);
  CheckUcx(config, faults);
  const auto at_most = [&](const char* small, auto small_value, const char* large,
                           auto large_value) {
    if (small_value <= large_value) return;
    faults->push_back(absl::StrCat(small, ": got ", small_value, ", must be at most ", large, " (",
                                   large_value, ")"));
  };
  if (!std::has_single_bit(static_cast<uint32_t>(config.shm.ring_entries))) {
    faults->push_back(absl::StrCat("shm.ring_entries: got ", config.shm.ring_entries,
                                   ", must be a power of two"));
  }
  if (config.shm.path.size() > 107) {
    faults->push_back(
        absl::StrCat("shm.path: got ", config.shm.path.size(), " bytes, at most 107 are possible"));
  }
  if (config.limits.kv_cache_bytes > 0 && config.limits.kv_cache_bytes < kLeastKvCacheBytes) {
    faults->push_back(absl::StrCat("kv_cache.bytes: got ", config.limits.kv_cache_bytes,
                                   ", must be 0 or at least ", kLeastKvCacheBytes));
  }
  at_most("shm.region_bytes", config.shm.region_bytes, "shm.total_bytes", config.shm.total_bytes);
  at_most("shm.tenant_regions", config.shm.tenant_regions, "shm.regions_max",
          config.shm.regions_max);
  at_most("wire.peer_connections", config.wire.peer_connections, "wire.max_connections",
          config.wire.max_connections);
  at_most("shm.user_handshakes", config.shm.user_handshakes, "shm.handshakes_max",
          config.shm.handshakes_max);
  scheduler::Limits limits = config.limits;
  at_most("wire.message_bytes", config.wire.message_bytes, "wire.inflight_bytes",
          config.wire.inflight_bytes);
  at_most("wire.inflight_bytes", config.wire.inflight_bytes, "wire.staging_bytes",
          config.wire.staging_bytes);
  // Staging must hold one request and its reply, each rounded up to a power of two, and as much
  // again.
  at_most("wire.message_bytes x 8", config.wire.message_bytes * 8, "wire.staging_bytes",
          config.wire.staging_bytes);
  at_most("wire.max_watchers", config.wire.max_watchers + 1, "wire.control_threads",
          config.wire.control_threads);
  at_most("limits.max_heads", limits.max_heads, "limits.launch_packed_rows",
          limits.launch_packed_rows);
  at_most("limits.prefill_rows", limits.prefill_rows, "limits.launch_rows", limits.launch_rows);
  at_most("limits.decode_rows", limits.decode_rows, "limits.launch_rows", limits.launch_rows);
  at_most("limits.max_step_rows", limits.max_step_rows, "limits.max_sequence_rows x sequences",
          int64_t{limits.max_sequence_rows} * limits.max_step_sequences);
  at_most("limits.sequence_lease_ms", limits.sequence_lease_ms, "limits.max_lease_ms",
          limits.max_lease_ms);
  at_most("limits.step_lease_ms", limits.step_lease_ms, "limits.max_lease_ms", limits.max_lease_ms);
  at_most("limits.model_lease_ms", limits.model_lease_ms, "limits.max_lease_ms",
          limits.max_lease_ms);
  at_most("limits.slice_wait_us", limits.slice_wait_us, "limits.queue_ms x 1000",
          limits.queue_ms * 1000);
  at_most("limits.ahead_us", limits.ahead_us, "limits.launch_ms x 1000", limits.launch_ms * 1000);
  at_most("limits.kv_wait_ms", limits.kv_wait_ms, "limits.queue_ms", limits.queue_ms);
  at_most("limits.queue_ms", limits.queue_ms, "limits.max_lease_ms", limits.max_lease_ms);
  at_most("limits.max_step_sequences", limits.max_step_sequences, "limits.max_sequences",
          limits.max_sequences);
  if (!faults->empty()) return;
  // A configuration accepted here must start: the engine's own checks of its limits decide.
  if (limits.kv_cache_bytes == 0) limits.kv_cache_bytes = kLeastKvCacheBytes;
  if (limits.weights_bytes == Config::kChooseWeights) limits.weights_bytes = 0;
  if (absl::Status status = scheduler::CheckLimits(limits); !status.ok()) {
    faults->push_back(std::string(status.message()));
  }
}

LoadedConfig LoadConfig(const std::vector<std::string>& arguments,
                        const std::map<std::string, std::string>& environment) {
  LoadedConfig loaded;
  for (const ConfigKey& key : ConfigKeys()) loaded.origin[key.name] = "default";
  std::string& file = loaded.file;
  if (const auto named = environment.find("MLA_CONFIG"); named != environment.end()) {
    file = named->second;
  }
  const std::vector<Assignment> flags = ReadFlags(arguments, &file, &loaded);
  if (!file.empty()) ApplyFile(file, &loaded);
  ApplyEnvironment(environment, &loaded);
  for (const Assignment& flag : flags) Assign(*flag.key, flag.value, flag.origin, &loaded);
  CheckConfig(loaded.config, &loaded.faults);
  return loaded;
}

}  // namespace mla::server
