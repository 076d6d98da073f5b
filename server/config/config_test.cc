#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/config/yaml_file.h"

namespace mla::server {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class File {
 public:
  explicit File(const std::string& text) {
    char name[] = "/tmp/mla-config-XXXXXX";
    const int fd = mkstemp(name);
    path_ = name;
    std::ofstream(path_, std::ios::binary) << text;
    close(fd);
  }
  ~File() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(ConfigTest, DefaultsAreValid) { EXPECT_THAT(LoadConfig({}, {}).faults, IsEmpty()); }

TEST(ConfigTest, FileThenEnvironmentThenFlags) {
  const File file("kv_cache:\n  bytes: 2GiB\n  page_size: 16\nlimits:\n  max_models: 3\n");
  const auto loaded = LoadConfig({"--config", file.path(), "--limits-max-models=5"},
                                 {{"MLA_KV_CACHE_PAGE_SIZE", "32"}, {"PATH", "x"}});
  ASSERT_THAT(loaded.faults, IsEmpty());
  EXPECT_EQ(loaded.config.limits.kv_cache_bytes, int64_t{2} << 30);
  EXPECT_EQ(loaded.config.limits.default_page_size, 32);
  EXPECT_EQ(loaded.config.limits.max_models, 5);
  EXPECT_EQ(loaded.origin.at("kv_cache.bytes"), "file " + file.path() + ":2");
  EXPECT_EQ(loaded.origin.at("kv_cache.page_size"), "env MLA_KV_CACHE_PAGE_SIZE");
  EXPECT_EQ(loaded.origin.at("limits.max_models"), "flag --limits-max-models");
  EXPECT_EQ(loaded.origin.at("log.level"), "default");
}

TEST(ConfigTest, TenantsHaveSharesAndQuotas) {
  using scheduler::Resource;
  const File file(
      "tenants:\n  sequences: 5\n  quotas:\n    a.b: {kv_bytes: 2GiB, weight: 7}\n"
      "    \"spiffe://x/y\": {models: 0}\nlimits:\n  max_models: 2\n  max_open_steps: 9\n");
  const auto loaded = LoadConfig({"--config", file.path()}, {});
  ASSERT_THAT(loaded.faults, IsEmpty());
  const scheduler::TenantTableOptions options = TenantOptionsOf(loaded.config);
  EXPECT_EQ(options.default_bounds[Resource::kSequences], 5);
  // Shares are rounded up: a tenant alone may have both models.
  EXPECT_EQ(options.default_bounds[Resource::kModels], 2);
  EXPECT_FALSE(options.default_shares[Resource::kSequences]);
  EXPECT_TRUE(options.default_shares[Resource::kModels]);
  EXPECT_FALSE(options.default_shares[Resource::kRegions]) << "shm.tenant_regions is its bound";
  EXPECT_EQ(options.default_bounds[Resource::kOpenSteps], 5);
  EXPECT_EQ(options.server_bounds[Resource::kOpenSteps], 9);
  EXPECT_EQ(options.default_bounds[Resource::kRegions], loaded.config.shm.tenant_regions);
  // Uploads can take neither the last control call nor one of the reserve.
  EXPECT_LT(options.server_bounds[Resource::kUploads],
            options.server_bounds[Resource::kControlCalls]);
  EXPECT_EQ(options.server_bounds[Resource::kControlCalls],
            loaded.config.wire.control_threads - loaded.config.wire.control_reserve);
  EXPECT_EQ(options.quotas.at("a.b").bounds[Resource::kKvBytes], int64_t{2} << 30);
  EXPECT_EQ(options.quotas.at("a.b").weight, 7);
  EXPECT_EQ(options.quotas.at("spiffe://x/y").bounds[Resource::kModels], 0);
  EXPECT_THAT(PrintConfig(loaded), HasSubstr("tenants.quotas.a.b.kv_bytes"));
}

TEST(ConfigTest, BadTenantQuotasAreNamed) {
  const File file(
      "tenants:\n  quotas:\n    a: {pages: 1, models: -1, kv_bytes: x, weight: 1001}\n"
      "    \"b c\": {models: 1}\n    models: 3\n");
  const auto loaded = LoadConfig({"--config", file.path()}, {});
  EXPECT_EQ(loaded.faults.size(), 6u);
  for (const char* key :
       {"a.pages", "a.models", "a.kv_bytes", "a.weight", "b c.models", "models"}) {
    EXPECT_THAT(loaded.faults, Contains(HasSubstr(std::string("tenants.quotas.") + key + ": ")))
        << key;
  }
}

TEST(ConfigTest, FlagForms) {
  const auto loaded = LoadConfig({"--backend", "cpu", "--deterministic", "--no-backend-pin-threads",
                                  "--kv-cache-bytes", "64MiB", "--check-config"},
                                 {});
  ASSERT_THAT(loaded.faults, IsEmpty());
  EXPECT_EQ(loaded.config.backend, "cpu");
  EXPECT_TRUE(loaded.config.backend_options.deterministic);
  EXPECT_FALSE(loaded.config.backend_options.pin_threads);
  EXPECT_EQ(loaded.config.limits.kv_cache_bytes, 64 << 20);
  EXPECT_TRUE(loaded.command.check_config);
}

TEST(ConfigTest, GpuSettingsReachTheBackendsOptions) {
  const File file("gpu:\n  expanded_workspace_bytes: 2GiB\n  device: 3\n");
  const auto loaded = LoadConfig({"--config", file.path(), "--gpu-memory-fraction=0.5"},
                                 {{"MLA_GPU_WATCHDOG_MS", "2500"}});
  ASSERT_THAT(loaded.faults, IsEmpty());
  const kernels::BackendOptions& options = loaded.config.backend_options;
  EXPECT_EQ(options.gpu_expanded_workspace_bytes, int64_t{2} << 30);
  EXPECT_EQ(options.device, 3);
  EXPECT_EQ(options.gpu_memory_fraction, 0.5);
  EXPECT_EQ(options.gpu_watchdog_ms, 2500);
  EXPECT_THAT(HelpText(), HasSubstr("--gpu-expanded-workspace-bytes"));
}

struct Bad {
  const char* flag;      // arguments, separated by a blank
  const char* expected;  // a part of the only fault
};

constexpr Bad kBad[] = {
    {"--kv-cache-bytes=1MB", "kv_cache.bytes: got \"1MB\", must be 0 .. 1TiB"},
    {"--kv-cache-bytes=1048575", "kv_cache.bytes: got 1048575, must be 0 or at least 1048576"},
    {"--kv-cache-bytes=-1", "kv_cache.bytes: got \"-1\""},
    {"--kv-cache-bytes=9999TiB", "kv_cache.bytes: got \"9999TiB\""},
    {"--kv-cache-bytes=9223372036854775807GiB", "kv_cache.bytes"},
    {"--kv-cache-bytes=1,5GiB", "kv_cache.bytes: got \"1,5GiB\""},
    {"--kv-cache-bytes=1GB", "kv_cache.bytes: got \"1GB\""},
    {"--kv-cache-bytes=GiB", "kv_cache.bytes"},
    {"--kv-cache-bytes=", "kv_cache.bytes: got \"\""},
    {"--kv-cache-bytes=1e9", "kv_cache.bytes"},
    {"--kv-cache-page-size=0", "kv_cache.page_size: got \"0\", must be 1 .. 4096"},
    {"--kv-cache-page-size=4097", "kv_cache.page_size"},
    {"--kv-cache-page-size=big", "kv_cache.page_size"},
    {"--limits-max-sequences=0", "limits.max_sequences"},
    {"--limits-max-sequences=1000001", "limits.max_sequences"},
    {"--limits-max-sequences=3", "limits.max_step_sequences: got 512"},
    {"--limits-max-sequence-rows=1073741825", "limits.max_sequence_rows"},
    {"--limits-max-pages-per-sequence=0", "limits.max_pages_per_sequence"},
    {"--limits-max-models=1025", "limits.max_models"},
    {"--limits-max-layers=0", "limits.max_layers"},
    {"--limits-max-heads=-5", "limits.max_heads"},
    {"--limits-launch-packed-rows=64",
     "limits.max_heads: got 128, must be at most "
     "limits.launch_packed_rows (64)"},
    {"--limits-max-row-dim=0", "limits.max_row_dim"},
    {"--limits-max-v-dim=99999", "limits.max_v_dim"},
    {"--limits-max-hidden-size=0", "limits.max_hidden_size"},
    {"--limits-max-top-k=65537", "limits.max_top_k"},
    {"--limits-weights-bytes=5000TiB", "limits.weights_bytes"},
    {"--limits-max-step-rows=0", "limits.max_step_rows"},
    {"--limits-max-step-sequences=65537", "limits.max_step_sequences"},
    {"--limits-max-open-steps=0", "limits.max_open_steps"},
    {"--limits-max-participants=0", "limits.max_participants"},
    {"--limits-max-tenants=0", "limits.max_tenants"},
    {"--limits-queue-requests=0", "limits.queue_requests"},
    {"--limits-launch-rows=1024", "limits.prefill_rows: got 2048, must be at most"},
    {"--limits-launch-requests=0", "limits.launch_requests"},
    {"--limits-prefill-rows=5000", "limits.prefill_rows: got 5000"},
    {"--limits-decode-rows=257", "limits.decode_rows"},
    {"--limits-sequence-lease-ms=99", "limits.sequence_lease_ms"},
    {"--limits-sequence-lease-ms=7200000", "limits.sequence_lease_ms: got 7200000, must be at"},
    {"--limits-max-lease-ms=0", "limits.max_lease_ms"},
    {"--limits-kv-wait-ms=60000", "limits.kv_wait_ms: got 60000, must be at most"},
    {"--limits-queue-ms=0", "limits.queue_ms"},
    {"--limits-queue-ms=3600001", "limits.queue_ms: got 3600001, must be at most limits.max_lea"},
    {"--limits-step-lease-ms=3600001",
     "limits.step_lease_ms: got 3600001, must be at most limits.max_lea"},
    {"--limits-slice-wait-us=999999999", "limits.slice_wait_us"},
    {"--limits-max-step-sequences=1025", "limits.max_step_sequences: got 1025, must be at most"},
    {"--limits-max-name-bytes=0", "limits.max_name_bytes"},
    {"--wire-message-bytes=1KiB", "wire.message_bytes"},
    {"--wire-message-bytes=2GiB", "wire.message_bytes"},
    {"--wire-inflight-bytes=1MiB", "wire.message_bytes: got 4194304, must be at most"},
    {"--wire-inflight-bytes=1GiB", "wire.inflight_bytes: got 1073741824, must be at most"},
    {"--wire-staging-bytes=66MiB --wire-message-bytes=9MiB",
     "wire.message_bytes x 8: got 75497472, must be at most wire.staging_bytes (69206016)"},
    {"--wire-max-streams=0", "wire.max_streams"},
    {"--wire-connection-streams=0", "wire.connection_streams"},
    {"--wire-control-threads=3", "wire.control_threads"},
    {"--wire-max-watchers=64", "wire.max_watchers: got 65, must be at most"},
    {"--wire-metadata-bytes=100", "wire.metadata_bytes"},
    {"--wire-quota-bytes=1MiB", "wire.quota_bytes"},
    {"--wire-connection-age-ms=-1", "wire.connection_age_ms"},
    {"--wire-keepalive-ms=10", "wire.keepalive_ms"},
    {"--wire-slow-reader-ms=0", "wire.slow_reader_ms"},
    {"--listen=nonsense", "server.listen: got \"nonsense\""},
    {"--listen=127.0.0.1:65536", "server.listen"},
    {"--listen=127.0.0.1:-1", "server.listen"},
    {"--listen=:50551", "server.listen"},
    {"--listen=0.0.0.0:50551", "an address beyond loopback needs tls.cert"},
    {"--listen=10.0.0.1:50551", "an address beyond loopback needs tls.cert"},
    {"--listen=[::]:50551", "an address beyond loopback needs tls.cert"},
    {"--ops-listen=localhost", "ops.listen: got \"localhost\""},
    {"--ops-connections=0", "ops.connections"},
    {"--shm-ring-entries=1", "shm.ring_entries: got \"1\", must be 2 .. 4096"},
    {"--shm-ring-entries=96", "shm.ring_entries: got 96, must be a power of two"},
    {"--shm-region-bytes=512MiB", "shm.region_bytes: got 536870912, must be at most"},
    {"--shm-regions-max=0", "shm.regions_max"},
    {"--ucx-sessions=0", "ucx.sessions: got \"0\", must be 1 .. 1024"},
    {"--ucx-sessions=64", "ucx.sessions: got 64, must be less than wire.control_threads (64)"},
    {"--ucx-open-ms=1", "ucx.open_ms"},
    {"--tls-cert=a.pem", "tls.cert: tls.cert, tls.key and tls.client_ca go together; 1 of 3"},
    {"--client-ca=a.pem", "1 of 3 given"},
    {"--tls-reload-ms=1", "tls.reload_ms"},
    {"--log-format=xml", "log.format: got \"xml\", must be text, json"},
    {"--log-level=loud", "log.level: got \"loud\""},
    {"--server-reflection=maybe", "server.reflection"},
    {"--tracing-otlp-target=10.0.0.1:4317", "tracing.otlp_target: got 10.0.0.1:4317"},
    {"--tracing-queue-spans=1", "tracing.queue_spans"},
    {"--insecure=perhaps", "server.insecure: got \"perhaps\", must be true or false"},
    {"--server-drain-deadline-ms=x", "server.drain_deadline_ms"},
    {"--server-unhealthy-after-ms=0", "server.unhealthy_after_ms"},
    {"--backend-threads=-1", "backend.threads"},
    {"--gpu-device=-1", "gpu.device: got \"-1\", must be 0 .. 1023"},
    {"--gpu-memory-fraction=1.5", "gpu.memory_fraction: got \"1.5\""},
    {"--gpu-memory-fraction=nan", "gpu.memory_fraction"},
    {"--gpu-expanded-workspace-bytes=1023KiB", "gpu.expanded_workspace_bytes: got \"1023KiB\""},
    {"--gpu-expanded-workspace-bytes=0", "gpu.expanded_workspace_bytes: got \"0\", must be 1MiB"},
    {"--gpu-watchdog-ms=99", "gpu.watchdog_ms: got \"99\""},
    {"--cpu-isa=mmx", "backend.cpu_isa: got \"mmx\", must be \"\", portable"},
    {"--no-such-flag=1", "--no-such-flag=1: unknown flag"},
    {"--kv-cache-bytes", "--kv-cache-bytes: needs a value"},
    {"stray", "stray: unknown flag"},
    {"--config=/nonexistent.yaml", "/nonexistent.yaml: cannot be read"},
};

TEST(ConfigTest, BadValuesAreNamed) {
  for (const Bad& bad : kBad) {
    const std::vector<std::string> flags = absl::StrSplit(bad.flag, ' ');
    const auto loaded = LoadConfig(flags, {});
    ASSERT_EQ(loaded.faults.size(), 1u)
        << bad.flag << ": " << ::testing::PrintToString(loaded.faults);
    EXPECT_THAT(loaded.faults[0], HasSubstr(bad.expected)) << bad.flag;
  }
  EXPECT_GE(std::size(kBad), 60u);
}

// --check-config promises a start. Each key is set to either end of its range. It is then either
// refused because of another key, or the engine accepts it; ranges are not wider than what the
// engine can do.
TEST(ConfigTest, WhatPassesTheEngineTakes) {
  int taken = 0;
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.min == key.max) continue;  // text
    for (const double end : {key.min, key.max}) {
      const std::string value = key.type == ConfigType::kDouble ? absl::StrCat(end)
                                : key.type == ConfigType::kBool ? (end > 0 ? "true" : "false")
                                                                : absl::StrCat(int64_t(end));
      Config config;
      ASSERT_EQ(SetValue(key, value, &config), "") << key.name << " = " << value;
      // The others make room, so that only the key's own range can be in the way.
      scheduler::Limits roomy = config.limits;
      if (roomy.kv_cache_bytes == 0) roomy.kv_cache_bytes = 1 << 20;  // the backend's to choose
      if (roomy.weights_bytes < 0) roomy.weights_bytes = 0;
      roomy.max_lease_ms = std::max(roomy.max_lease_ms, int64_t{86400000});
      roomy.max_sequences = std::max(roomy.max_sequences, roomy.max_step_sequences);
      roomy.launch_rows = std::max({roomy.launch_rows, roomy.prefill_rows, roomy.decode_rows});
      roomy.prefill_rows = std::min(roomy.prefill_rows, roomy.launch_rows);
      roomy.decode_rows = std::min(roomy.decode_rows, roomy.launch_rows);
      roomy.launch_packed_rows = std::max(roomy.launch_packed_rows, roomy.max_heads);
      roomy.tier_high_percent = std::max(roomy.tier_high_percent, roomy.tier_low_percent);
      roomy.slice_wait_us = std::min(roomy.slice_wait_us, roomy.queue_ms * 1000);
      EXPECT_EQ(scheduler::CheckLimits(roomy), absl::OkStatus()) << key.name << " = " << value;
      std::vector<std::string> faults;
      CheckConfig(config, &faults);
      if (!faults.empty()) continue;
      ++taken;
      if (config.limits.kv_cache_bytes == 0) config.limits.kv_cache_bytes = 1 << 20;
      if (config.limits.weights_bytes < 0) config.limits.weights_bytes = 0;
      EXPECT_EQ(scheduler::CheckLimits(config.limits), absl::OkStatus()) << key.name;
    }
  }
  EXPECT_GT(taken, 80);
}

TEST(ConfigTest, NothingToServe) {
  EXPECT_THAT(LoadConfig({"--listen=", "--unix-path="}, {}).faults,
              ElementsAre(HasSubstr("nothing to serve")));
  EXPECT_THAT(LoadConfig({"--unix-path=" + std::string(108, 'x')}, {}).faults,
              ElementsAre(HasSubstr("108 bytes")));
  EXPECT_THAT(LoadConfig({"--unix-path=/run/a,b/mla.sock"}, {}).faults,
              ElementsAre(HasSubstr("without a comma")));
  EXPECT_THAT(LoadConfig({"--listen=0.0.0.0:1", "--insecure"}, {}).faults, IsEmpty());
  EXPECT_THAT(LoadConfig({"--ucx-enabled", "--no-shm-enabled"}, {}).faults,
              ElementsAre(HasSubstr("ucx.enabled: got true, must be false without shm.enabled")));
  EXPECT_THAT(LoadConfig({"--ucx-enabled"}, {}).faults, IsEmpty());
  EXPECT_THAT(LoadConfig({"--ucx-enabled", "--ucx-puts"}, {}).faults, IsEmpty());
  EXPECT_THAT(
      LoadConfig({"--ucx-puts", "--ucx-device-memory", "--shm-device-bytes=1GiB"}, {}).faults,
      IsEmpty());
  EXPECT_THAT(LoadConfig({"--ucx-device-memory"}, {}).faults,
              ElementsAre("ucx.device_memory: got true, must be false without ucx.puts",
                          "ucx.device_memory: got true, must be false without shm.device_bytes"));
  EXPECT_THAT(LoadConfig({"--ucx-encrypted"}, {}).faults,
              ElementsAre("ucx.encrypted: got true, must be false without tls.cert"));
  EXPECT_THAT(LoadConfig({"--ucx-encrypted", "--ucx-puts"}, {}).faults,
              testing::Contains("ucx.encrypted: got true, must be false with ucx.puts"));
  EXPECT_THAT(
      LoadConfig({"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k", "--client-ca=a"}, {}).faults,
      IsEmpty());
}

TEST(ConfigTest, AllFaultsAtOnceWithTheirPlaces) {
  const File file("kv_cache:\n  bytes: lots\n  colour: blue\nlog:\n  level: loud\n");
  const auto loaded = LoadConfig({"--config=" + file.path(), "--ops-connections=0"},
                                 {{"MLA_LIMITS_MAX_HEADS", "x"}, {"MLA_TYPO", "1"}});
  EXPECT_THAT(loaded.faults,
              ::testing::UnorderedElementsAre(
                  HasSubstr("kv_cache.bytes: got \"lots\""),
                  HasSubstr("kv_cache.colour: unknown key (file " + file.path() + ":3)"),
                  HasSubstr("log.level: got \"loud\""), HasSubstr("limits.max_heads: got \"x\""),
                  HasSubstr("MLA_TYPO: unknown environment name"),
                  HasSubstr("ops.connections: got \"0\"")));
}

TEST(ConfigTest, WhatClientsReadIsNoFault) {
  const std::map<std::string, std::string> theirs = {
      {"MLA_TARGET", "a:1"}, {"MLA_CLIENT_LIBRARY", "/x.so"}, {"MLA_SGLANG", "{}"}};
  EXPECT_THAT(LoadConfig({}, theirs).faults, IsEmpty());
}

// As Kubernetes makes them for services of the names mla, mla-server and mla-a-port.
TEST(ConfigTest, LinksToServicesAreIgnored) {
  const std::map<std::string, std::string> links = {
      {"MLA_PORT", "tcp://10.0.0.1:50551"},
      {"MLA_PORT_50551_TCP", "tcp://10.0.0.1:50551"},
      {"MLA_PORT_50551_TCP_ADDR", "10.0.0.1"},
      {"MLA_PORT_50551_TCP_PORT", "50551"},
      {"MLA_PORT_50551_TCP_PROTO", "tcp"},
      {"MLA_SERVICE_HOST", "10.0.0.1"},
      {"MLA_SERVICE_PORT", "50551"},
      {"MLA_SERVER_SERVICE_HOST", "10.0.0.1"},
      {"MLA_SERVER_SERVICE_PORT_GRPC_TLS", "50551"},
      {"MLA_SERVER_PORT_8080_UDP", "udp://10.0.0.1:8080"},
      {"MLA_A_PORT_PORT", "tcp://10.0.0.1:1"}};
  const auto loaded = LoadConfig({}, links);
  EXPECT_THAT(loaded.faults, IsEmpty());
  EXPECT_EQ(loaded.service_links.size(), links.size());
  for (const char* const name :
       {"MLA_PORTS", "MLA_PORT_TCP", "MLA_PORT_1_TCP_HOST", "MLA_SERVICE", "MLA_SERVER_HOST",
        "MLA_SERVER_LISTEN_PORTX", "MLA_XSERVICE_HOST"}) {
    EXPECT_THAT(LoadConfig({}, {{name, "1"}}).faults, ElementsAre(HasSubstr(name))) << name;
  }
}

TEST(ConfigTest, YamlThatIsRefused) {
  std::string deep = "a:";
  for (int i = 1; i < 12; ++i) deep += "\n" + std::string(static_cast<size_t>(i), ' ') + "a:";
  const std::pair<std::string, const char*> kBad[] = {
      {"a: &x 1\nb: *x\n", "anchors are not allowed"},
      {"a: *x\n", "a.yaml:1"},
      {"a: [1, 2]\n", "lists are not allowed"},
      {"kv_cache: {bytes: 1, bytes: 2}\n", "given twice"},
      {"a: b: c\n", "a.yaml:1"},
      {"? [a]\n: b\n", "lists are not allowed"},
      {"? {a: 1}\n: b\n", "a key must be a plain word"},
      {"\"unclosed", "a.yaml:1"},
      {"--- \na: 1\n--- \nb: 2\n", "one document only"},
      {"just words\n", "expected `group:` lines"},
      {",og: {fom", "one document only"},  // the parser would go round for ever
      {deep, "nested deeper than 8"},
      {std::string(size_t{2} << 20, ' '), "1048576"},
  };
  for (const auto& [text, expected] : kBad) {
    EXPECT_THAT(ParseYaml(text, "a.yaml").faults, Contains(HasSubstr(expected)))
        << text.substr(0, 40);
  }
  EXPECT_THAT(ParseYaml("", "a.yaml").faults, IsEmpty());
  EXPECT_THAT(ParseYaml("# nothing\n", "a.yaml").faults, IsEmpty());
}

TEST(ConfigTest, TableIsConsistent) {
  std::set<std::string> names;
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_TRUE(names.insert(FlagName(key)).second) << key.name;
    if (*key.short_flag != '\0') {
      EXPECT_TRUE(names.insert(key.short_flag).second) << key.name;
    }
    EXPECT_NE(std::string(key.name).find('.'), std::string::npos);
    EXPECT_FALSE(std::string(key.meaning).empty() || std::string(key.edge).empty()) << key.name;
    // The default, written as text, is read back as itself.
    Config config;
    const std::string value = ValueText(key, config);
    EXPECT_EQ(SetValue(key, value, &config), "") << key.name;
    EXPECT_EQ(ValueText(key, config), value) << key.name;
  }
}

TEST(ConfigTest, ATenantMayBeGivenAllThatTheServerHas) {
  const auto largest = [](const std::string& name) {
    const auto& keys = ConfigKeys();
    const auto key = std::find_if(keys.begin(), keys.end(),
                                  [&](const ConfigKey& each) { return each.name == name; });
    return key == keys.end() ? -1 : key->max;
  };
  for (const scheduler::ResourceRow& row : scheduler::ResourceRows()) {
    EXPECT_GT(largest(row.config_key), 0) << row.name;
    EXPECT_GE(largest(row.config_key), largest(row.server_key)) << row.name;
  }
}

TEST(ConfigTest, ExampleFileIsTheTable) {
  const std::string example = ReadFile("deploy/config/example.yaml");
  EXPECT_EQ(example, ExampleYaml()) << "write it with: mla-server --print-example";
  const File file(example);
  const auto loaded = LoadConfig({"--config=" + file.path()}, {});
  EXPECT_THAT(loaded.faults, IsEmpty());
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_THAT(loaded.origin.at(key.name), HasSubstr("file ")) << key.name;
    EXPECT_EQ(ValueText(key, loaded.config), ValueText(key, Config())) << key.name;
  }
}

// An operator who takes the comment signs away has quotas.
TEST(ConfigTest, QuotasOfTheExampleFileCanBeUsed) {
  const File file(absl::StrReplaceAll(
      ExampleYaml(), {{"  # quotas:\n", "  quotas:\n"}, {"  #   research:", "    research:"}}));
  const auto loaded = LoadConfig({"--config=" + file.path()}, {});
  EXPECT_THAT(loaded.faults, IsEmpty());
  EXPECT_EQ(loaded.config.tenants.quotas.at("research").weight, 2);
}

TEST(ConfigTest, DocumentedReferenceIsTheTable) {
  EXPECT_THAT(ReadFile("docs/configuration.md"), HasSubstr(ReferenceMarkdown()))
      << "replace it with the output of: mla-server --print-reference";
}

TEST(ConfigTest, HelpIsTheTable) {
  const std::string help = HelpText();
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string start = absl::StrCat("\n  ", FlagName(key));
    EXPECT_THAT(help, AnyOf(HasSubstr(start + "="), HasSubstr(start + ", " + key.short_flag + "=")))
        << key.name;
  }
  for (const char* option : {"--config", "--check-config", "--print-config", "--print-example",
                             "--print-reference", "--version", "--help"}) {
    EXPECT_THAT(help, HasSubstr(absl::StrCat("\n  ", option, " "))) << option;
  }
  for (const absl::string_view line : absl::StrSplit(help, '\n')) {
    EXPECT_LE(line.size(), 100u) << line;
    EXPECT_EQ(line.find(" ()"), absl::string_view::npos) << line;
  }
}

TEST(ConfigTest, UnixPath) {
  Config::Listen listen;
  EXPECT_EQ(UnixPath(listen, "/tmp"), "/tmp/mla-server-50551.sock");
  EXPECT_EQ(UnixPath(listen, "/run/user/7"), "/run/user/7/mla-server-50551.sock");
  listen.address = "127.0.0.1:0";
  EXPECT_EQ(UnixPath(listen, "/tmp"), "");
  listen.unix_path = "/x";
  EXPECT_EQ(UnixPath(listen, "/run"), "/x");
}

TEST(ConfigTest, Loopback) {
  for (const char* address : {"127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"}) {
    EXPECT_TRUE(IsLoopback(address)) << address;
  }
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1", "::1",
                              "127.example.org:1", "127.0.0.1.example.org:1"}) {
    EXPECT_FALSE(IsLoopback(address)) << address;
  }
}

}  // namespace
}  // namespace mla::server
