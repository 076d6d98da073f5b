// Operators' commands against a real server: quotas, eviction, drain and its cancellation, lists of
// all tenants' sequences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTenant[] = "default";  // of callers without a name
constexpr char kBench[] =
    "bench --heads=4 --lora=32 --rope=8 --nope=16 --v=16 --layers=2 --page-size=4 --context=8 "
    "--profile=expanded --duration=60 --quiet";

Result Call(const ServerProcess& server, const std::string& words) {
  return Shell(server.Mlactl(words));
}

// One resource of the tenant, from `mlactl quota`.
json Quota(const ServerProcess& server, const std::string& resource) {
  const Result result = Call(server, absl::StrCat("quota ", kTenant, " --json"));
  EXPECT_EQ(result.code, 0) << result.output;
  const json reply = json::parse(result.output);
  for (const json& usage : reply["tenants"][0]["resources"]) {
    if (usage["name"] == resource) return usage;
  }
  ADD_FAILURE() << resource << " is not in " << result.output;
  return {};
}

// Waits until the server has `want` sequences.
void AwaitSequences(const ServerProcess& server, int64_t want) {
  for (int i = 0; i < 200; ++i) {
    const json stats = json::parse(Call(server, "status --json").output);
    if (stats["sequences"] == want) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  FAIL() << "never " << want << " sequences";
}

TEST(MlactlOperatorTest, QuotasAreSetShownAndReset) {
  const ServerProcess server({});
  const json before = Quota(server, "sequences");
  EXPECT_EQ(before["source"], "QUOTA_SOURCE_DEFAULT");
  const Result set = Call(server, absl::StrCat("set-quota ", kTenant,
                                               " --bounds=sequences=3,kv_bytes=4MiB --weight=5"));
  EXPECT_EQ(set.code, 0) << set.output;
  EXPECT_THAT(set.output, AllOf(HasSubstr("runtime"), HasSubstr("4.00 MiB")));
  for (const auto& [flags, bound] : {std::pair("", "4.00 MiB"), {" -o wide", "4194304"}}) {
    EXPECT_THAT(Call(server, absl::StrCat("quota ", kTenant, flags)).output, HasSubstr(bound));
  }
  EXPECT_EQ(Quota(server, "sequences")["bound"], "3");
  EXPECT_EQ(Quota(server, "sequences")["source"], "QUOTA_SOURCE_RUNTIME");
  EXPECT_EQ(Quota(server, "kv_bytes")["bound"], absl::StrCat(4 << 20));
  const Result one = Call(server, absl::StrCat("quota ", kTenant, " --json"));
  EXPECT_EQ(json::parse(one.output)["tenants"][0]["weight"], 5) << one.output;
  const Result all = Call(server, "quotas");
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.output, AllOf(HasSubstr("(server)"), HasSubstr("runtime")));
  EXPECT_EQ(Call(server, absl::StrCat("set-quota ", kTenant, " --reset")).code, 0);
  EXPECT_EQ(Quota(server, "sequences"), before);
}

TEST(MlactlOperatorTest, WordsThatMakeNoQuotaAreRefused) {
  const ServerProcess server({});
  for (const char* words : {"", "--bounds=nothing=3", "--bounds=sequences=many", "--weight=0"}) {
    const Result result = Call(server, absl::StrCat("set-quota ", kTenant, " ", words));
    EXPECT_EQ(result.code, 1) << words << ": " << result.output;
  }
  EXPECT_EQ(Quota(server, "sequences")["source"], "QUOTA_SOURCE_DEFAULT");
}

TEST(MlactlOperatorTest, AQuotaHoldsForTheTenant) {
  const ServerProcess server({});
  ASSERT_EQ(Call(server, absl::StrCat("set-quota ", kTenant, " --bounds=models=0")).code, 0);
  const Result refused = Call(server, "attend");
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.output, HasSubstr("models"));
  ASSERT_EQ(Call(server, absl::StrCat("set-quota ", kTenant, " --reset")).code, 0);
  const Result served = Call(server, "attend");
  EXPECT_EQ(served.code, 0) << served.output;
}

TEST(MlactlOperatorTest, SequencesAndModelsAreEvicted) {
  const ServerProcess server({});
  for (const bool whole_model : {false, true}) {
    BackgroundCommand bench(server.Mlactl(kBench));
    AwaitSequences(server, 1);
    const json models = json::parse(Call(server, "models --json").output);
    const std::string name = models["models"][0]["model"]["model_id"];
    const Result evicted =
        Call(server, whole_model ? absl::StrCat("evict-model ", kTenant, " ", name)
                                 : absl::StrCat("evict-sequences ", kTenant, " --all"));
    EXPECT_EQ(evicted.code, 0) << evicted.output;
    EXPECT_THAT(evicted.output, HasSubstr(whole_model ? "model evicted, and 1 sequences"
                                                      : "1 sequences evicted, 0 not found"));
    EXPECT_NE(bench.Finish().code, 0);
    AwaitSequences(server, 0);
  }
  EXPECT_EQ(Call(server, absl::StrCat("evict-sequences ", kTenant)).code, 1);
}

TEST(MlactlOperatorTest, ADrainIsUndone) {
  const ServerProcess server({});
  EXPECT_EQ(Call(server, "drain --deadline-ms=2000").code, 0);
  EXPECT_EQ(server.Health(), 4);
  EXPECT_NE(Call(server, "attend").code, 0);
  EXPECT_EQ(Call(server, "cancel-drain").code, 0);
  EXPECT_EQ(server.Health(), 0);
  const Result served = Call(server, "attend");
  EXPECT_EQ(served.code, 0) << served.output;
}

TEST(MlactlOperatorTest, SequencesOfAllTenantsAreListedOverTls) {
  const Authority authority;
  const TestServer server([&](server::Config& config) {
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = "blue";
    config.listen.unix_path = "";
  });
  const std::string target = absl::StrCat("localhost:", server.server().tcp_port());
  const auto list = [&](const std::string& who, const std::string& words) {
    return Shell(absl::StrCat(
        kMlactl, " sequences ", words, " --target=", target, " --tls-ca=", authority.File("ca.pem"),
        " --tls-cert=", authority.File(who + ".pem"), " --tls-key=", authority.File(who + ".key")));
  };
  const auto red = client::Client::Connect(target, authority.As("red"));
  const auto blue = client::Client::Connect(target, authority.As("blue"));
  ASSERT_TRUE(red.ok() && blue.ok()) << red.status() << blue.status();
  Worker reds(red->get(), Dims(), "m", 1), blues(blue->get(), Dims(), "n", 2);
  auto first = reds.Open(), second = blues.Open();
  ASSERT_EQ(reds.Step({&*first}, {5}, v1::PROFILE_ABSORBED), absl::OkStatus());

  const Result shown = list("blue", "--all-tenants --json");
  ASSERT_EQ(shown.code, 0) << shown.output;
  const json sequences = json::parse(shown.output)["sequences"];
  ASSERT_EQ(sequences.size(), 2u) << shown.output;
  for (const json& one : sequences) {
    const bool is_red = one["tenant"] == "red";
    EXPECT_EQ(one["tenant"], is_red ? "red" : "blue");
    EXPECT_EQ(one["model_id"], is_red ? "m" : "n");
    EXPECT_EQ(one["length"], is_red ? "5" : "0");
    EXPECT_EQ(one["kv_bytes"] != "0", is_red);
    EXPECT_TRUE(one.contains("age_ms"));
  }
  const Result table = list("blue", "--all-tenants");
  EXPECT_THAT(table.output, AllOf(HasSubstr("tenant"), HasSubstr("age"), HasSubstr("red"),
                                  HasSubstr("idle"), HasSubstr("B")));
  EXPECT_THAT(list("blue", "--all-tenants -o wide").output, HasSubstr("epoch"));
  EXPECT_THAT(list("blue", "--all-tenants -o yaml").output, HasSubstr("tenant: \"red\""));
  // Without the flag an operator sees its own, and so does everyone else.
  EXPECT_THAT(list("blue", "").output, AllOf(HasSubstr(" n "), Not(HasSubstr(" m "))));
  EXPECT_THAT(list("red", "").output, AllOf(HasSubstr(" m "), Not(HasSubstr(" n "))));
  const Result refused = list("red", "--all-tenants");
  EXPECT_EQ(refused.code, 3) << refused.output;
  EXPECT_THAT(refused.output, AllOf(HasSubstr("not_an_operator"), Not(HasSubstr(" n "))));
}

}  // namespace
}  // namespace mla::integration
