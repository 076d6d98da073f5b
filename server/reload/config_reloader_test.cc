#include "server/reload/config_reloader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace mla::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A server that runs by a file of this text, and what it has taken over since.
struct Sample {
  explicit Sample(const std::string& first)
      : path(testing::TempDir() + "/reload.yaml"), text(first) {
    Write(first);
  }
  ~Sample() { std::remove(path.c_str()); }

  void Write(const std::string& now) {
    text = now;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << now;
  }
  LoadedConfig Load() const { return LoadConfig({"--config=" + path, "--log-format=json"}, {}); }

  std::string path, text;
  std::vector<Config> applied;
  ConfigReloader reloader{Load().config,
                          FileContents(path),
                          {.load = [this] { return Load(); },
                           .contents = [this] { return FileContents(path); },
                           .apply = [this](const Config& config) { applied.push_back(config); }}};
};

TEST(ReloadTest, LiveKeysAreTakenOverTogether) {
  Sample sample("log: {level: info}\n");
  sample.Write(
      "log: {level: debug}\nserver: {operators: ops, drain_deadline_ms: 1000}\n"
      "limits: {sequence_lease_ms: 20000}\ntenants:\n  sequences: 5\n  quotas:\n"
      "    research: {sequences: 7}\n");
  EXPECT_EQ(sample.reloader.Reload(), absl::OkStatus());
  ASSERT_EQ(sample.applied.size(), 1u);
  const Config& config = sample.applied[0];
  EXPECT_EQ(config.log.level, "debug");
  EXPECT_EQ(config.listen.operators, "ops");
  EXPECT_EQ(config.drain_deadline_ms, 1000);
  EXPECT_EQ(config.limits.sequence_lease_ms, 20000);
  EXPECT_EQ(config.tenants.bounds[scheduler::Resource::kSequences], 5);
  EXPECT_EQ(config.tenants.quotas.at("research").bounds[scheduler::Resource::kSequences], 7);
  EXPECT_EQ(sample.reloader.status().reloads, 1u);
  EXPECT_EQ(sample.reloader.Reload(), absl::OkStatus());  // nothing new
  EXPECT_EQ(sample.applied.size(), 1u);
}

TEST(ReloadTest, OneFaultRefusesAllOfIt) {
  const struct {
    const char* text;
    const char* why;
  } cases[] = {
      {"log: {level: loud}\ntenants: {sequences: 5}\n", "log.level: got \"loud\""},
      {"log: {level: debug}\nlimits: {max_models: 7}\n", "limits.max_models: only a restart"},
      {"log: {level: debug}\nno_such: {key: 1}\n", "no_such.key: unknown key"},
      {"log: {level: debug\n", "reload.yaml"},
      {"log: {level: debug}\nlimits: {sequence_lease_ms: 4999}\n", "must be at least 5000"},
      {"tenants: {metrics: 5}\nlog: {level: debug}\n", "tenants.metrics: only a restart"},
  };
  for (const auto& one : cases) {
    Sample sample("log: {level: info}\n");
    sample.Write(one.text);
    const absl::Status status = sample.reloader.Reload();
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.why));
    EXPECT_TRUE(sample.applied.empty()) << one.text;
    EXPECT_EQ(sample.reloader.status().refused, 1u);
    EXPECT_EQ(sample.reloader.status().why, status.message());
    EXPECT_EQ(sample.reloader.running().log.level, "info");
    sample.Write("log: {level: warning}\n");
    EXPECT_EQ(sample.reloader.Reload(), absl::OkStatus());
    EXPECT_EQ(sample.reloader.status().why, "");
    EXPECT_EQ(sample.applied.size(), 1u);
  }
}

TEST(ReloadTest, AShortLeaseIsRefusedByTheLongestSinceTheStart) {
  Sample sample("limits: {sequence_lease_ms: 10000}\n");
  sample.Write("limits: {sequence_lease_ms: 40000}\n");
  EXPECT_EQ(sample.reloader.Reload(), absl::OkStatus());
  sample.Write("limits: {sequence_lease_ms: 20000}\n");
  EXPECT_EQ(sample.reloader.Reload(), absl::OkStatus());
  sample.Write("limits: {sequence_lease_ms: 19999}\n");
  EXPECT_TRUE(absl::IsFailedPrecondition(sample.reloader.Reload()));
}

TEST(ReloadTest, AFileIsReadOnceItIsWritten) {
  Sample sample("log: {level: info}\n");
  EXPECT_FALSE(sample.reloader.Look());
  sample.Write("log: {lev");
  EXPECT_FALSE(sample.reloader.Look());  // it may go on
  sample.Write("log: {level: error}\n");
  EXPECT_FALSE(sample.reloader.Look());
  EXPECT_TRUE(sample.reloader.Look());
  ASSERT_EQ(sample.applied.size(), 1u);
  EXPECT_EQ(sample.applied[0].log.level, "error");
  EXPECT_FALSE(sample.reloader.Look());
  EXPECT_EQ(sample.reloader.status().refused, 0u);
  std::remove(sample.path.c_str());
  EXPECT_FALSE(sample.reloader.Look());
  EXPECT_TRUE(sample.reloader.Look());
  EXPECT_EQ(sample.reloader.status().refused, 1u);
  EXPECT_FALSE(sample.reloader.Look());  // refused once
  EXPECT_EQ(sample.reloader.status().refused, 1u);
}

TEST(ReloadTest, EveryLiveKeyExists) {
  std::vector<std::string> live;
  for (const ConfigKey& key : ConfigKeys()) {
    if (IsLive(key) && std::string(key.name).rfind("tenants.", 0) != 0) live.push_back(key.name);
  }
  EXPECT_THAT(live,
              testing::UnorderedElementsAre(
                  "server.operators", "server.plain_operators", "server.drain_deadline_ms",
                  "server.unhealthy_after_ms", "server.restart_after_ms", "log.level",
                  "limits.sequence_lease_ms", "limits.model_lease_ms", "limits.step_lease_ms"));
}

TEST(ReloadTest, ChangesAreNamed) {
  Config running, read;
  EXPECT_TRUE(ChangesOf(running, read).live.empty());
  read.log.level = "debug";
  read.limits.max_models += 1;
  read.tenants.quotas["a"].weight = 3;
  const ConfigChanges changes = ChangesOf(running, read);
  EXPECT_THAT(changes.live, ElementsAre("log.level", "tenants.quotas"));
  EXPECT_THAT(changes.fixed, ElementsAre("limits.max_models"));
}

}  // namespace
}  // namespace mla::server
