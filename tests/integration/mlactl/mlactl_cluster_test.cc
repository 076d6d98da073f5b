// The command `cluster` against real servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

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

Result Cluster(const std::string& target, const std::string& words) {
  return Shell(absl::StrCat(kMlactl, " cluster ", words, " --target=", target));
}

TEST(MlactlClusterTest, StatusHasARowAServerAndSaysWhoIsAway) {
  const TestServer a;
  ServerProcess b({});
  const std::string target = a.tcp_target() + "," + b.target();
  const auto client = a.Connect();
  Worker worker(client.get(), Dims(), "m", 1);
  const auto track = worker.Open();
  ASSERT_TRUE(track.ok());
  Result result = Cluster(target, "status --json");
  EXPECT_EQ(result.code, 0) << result.output;
  json servers = json::parse(result.output)["servers"];
  ASSERT_EQ(servers.size(), 2u);
  for (const json& one : servers) {
    EXPECT_EQ(one["state"], "serving");
    EXPECT_NE(one["version"], "");
    EXPECT_NE(one["device"], "");
    EXPECT_NE(one["bytes_total"], "0");
    EXPECT_EQ(one["sequences"], one["address"] == a.tcp_target() ? 1 : 0);
  }
  EXPECT_THAT(Cluster(target, "status").output, HasSubstr(b.target()));
  b.Signal(SIGKILL);
  b.Wait();
  result = Cluster(target, "status --json --timeout-ms=2000");
  EXPECT_EQ(result.code, 4) << result.output;
  for (const json& one : json::parse(result.output)["servers"]) {
    EXPECT_EQ(one["state"], one["address"] == a.tcp_target() ? "serving" : "away");
  }
}

TEST(MlactlClusterTest, TopHasTheRatesOfEachServerAndOfAll) {
  const TestServer a;
  ServerProcess b({});
  const std::string target = a.tcp_target() + "," + b.target();
  const auto client = a.Connect();
  Worker worker(client.get(), Dims(), "m", 1);
  auto track = worker.Open();
  ASSERT_TRUE(track.ok());
  std::atomic<bool> ends{false};
  std::thread load([&] {
    while (!ends) {
      EXPECT_EQ(worker.Step({&*track}, {1}, v1::PROFILE_ABSORBED, {0}), absl::OkStatus());
    }
  });
  const Result text = Cluster(target, "top --interval-ms=500 --count=1");
  // The command of one server shows the fleet where the target is one.
  const Result shown =
      Shell(absl::StrCat(kMlactl, " top --interval-ms=500 --count=1 --json --target=", target));
  b.Signal(SIGKILL);
  b.Wait();
  const Result away = Cluster(target, "top --interval-ms=100 --count=1 --json --timeout-ms=1000");
  ends = true;
  load.join();
  EXPECT_EQ(text.code, 0) << text.output;
  for (const std::string& name : {a.tcp_target(), b.target(), std::string("\nall ")}) {
    EXPECT_THAT(text.output, HasSubstr(name));
  }
  ASSERT_EQ(shown.code, 0) << shown.output;
  json top = json::parse(shown.output);
  ASSERT_EQ(top["servers"].size(), 2u);
  for (const json& one : top["servers"]) {
    EXPECT_EQ(one["state"], "serving");
    EXPECT_EQ(one["requests_per_s"] > 0, one["address"] == a.tcp_target()) << shown.output;
    EXPECT_EQ(one["sequences"], one["address"] == a.tcp_target() ? 1 : 0);
  }
  EXPECT_GT(top["total"]["requests_per_s"], 0);
  ASSERT_EQ(away.code, 0) << away.output;
  top = json::parse(away.output);
  for (const json& one : top["servers"]) {
    EXPECT_EQ(one["state"], one["address"] == a.tcp_target() ? "serving" : "away");
  }
  EXPECT_EQ(top["total"]["sequences"], 1);
}

TEST(MlactlClusterTest, SequencesAreThoseOfAllServers) {
  const TestServer a, b;
  const std::string target = a.tcp_target() + "," + b.tcp_target();
  const auto first = a.Connect(), second = b.Connect();
  Worker one(first.get(), Dims(), "m", 1), two(second.get(), Dims(), "n", 2);
  auto here = one.Open(), there = two.Open();
  ASSERT_EQ(two.Step({&*there}, {5}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const Result result = Cluster(target, "sequences --json");
  EXPECT_EQ(result.code, 0) << result.output;
  const json sequences = json::parse(result.output)["sequences"];
  ASSERT_EQ(sequences.size(), 2u);
  for (const json& sequence : sequences) {
    const bool is_here = sequence["address"] == a.tcp_target();
    EXPECT_EQ(sequence["model_id"], is_here ? "m" : "n");
    EXPECT_EQ(sequence["length"], is_here ? "0" : "5");
  }
}

TEST(MlactlClusterTest, OperatorsListTheSequencesOfAllTenants) {
  const Authority authority;
  const auto change = [&](server::Config& config) {
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = "blue";
    config.listen.unix_path = "";
  };
  const TestServer a(change), b(change);
  const std::string here = absl::StrCat("localhost:", a.server().tcp_port());
  const std::string there = absl::StrCat("localhost:", b.server().tcp_port());
  const auto list = [&](const std::string& who, const std::string& words) {
    return Cluster(here + "," + there,
                   absl::StrCat("sequences ", words, " --tls-ca=", authority.File("ca.pem"),
                                " --tls-cert=", authority.File(who + ".pem"),
                                " --tls-key=", authority.File(who + ".key")));
  };
  const auto red = client::Client::Connect(there, authority.As("red"));
  ASSERT_TRUE(red.ok()) << red.status();
  Worker worker(red->get(), Dims(), "m", 1);
  auto track = worker.Open();
  ASSERT_EQ(worker.Step({&*track}, {5}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const Result shown = list("blue", "--all-tenants --json");
  EXPECT_EQ(shown.code, 0) << shown.output;
  const json sequences = json::parse(shown.output)["sequences"];
  ASSERT_EQ(sequences.size(), 1u) << shown.output;
  EXPECT_EQ(sequences[0]["address"], there);
  EXPECT_EQ(sequences[0]["tenant"], "red");
  EXPECT_EQ(sequences[0]["state"], "idle");
  EXPECT_TRUE(sequences[0].contains("age_ms"));
  EXPECT_NE(sequences[0]["kv_bytes"], "0");
  EXPECT_EQ(json::parse(list("blue", "--json").output)["sequences"].size(), 0u) << "its own";
  const Result refused = list("red", "--all-tenants");
  EXPECT_EQ(refused.code, 3) << refused.output;
  EXPECT_THAT(refused.output, AllOf(HasSubstr(here + ": "), HasSubstr(there + ": "),
                                    Not(HasSubstr("does not answer"))));
  EXPECT_EQ(Cluster(here, "status --all-tenants").code, 1);
}

TEST(MlactlClusterTest, RebalanceSaysWhoGetsNewSequencesAndMovesNothing) {
  const TestServer a, b;
  const auto client = a.Connect();
  Worker worker(client.get(), Dims(), "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 20; ++i) {
    if (i % 4 == 0) tracks.push_back(*worker.Open());
    ASSERT_EQ(worker.Step({&tracks.back()}, {1000}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
  }
  const std::string target = a.tcp_target() + "," + b.tcp_target();
  const Result result = Cluster(target, "rebalance --json");
  EXPECT_EQ(result.code, 4) << result.output;
  const json reply = json::parse(result.output);
  for (const json& one : reply["servers"]) {
    EXPECT_EQ(one["gets_new_sequences"], one["address"] == b.tcp_target()) << result.output;
  }
  EXPECT_THAT(Cluster(target, "rebalance").output,
              HasSubstr("no new sequences: " + a.tcp_target()));
  for (Track& track : tracks) {
    EXPECT_EQ(track.sequence.Refresh(), absl::OkStatus());
    EXPECT_EQ(track.sequence.length(), 4000u);
  }
}

TEST(MlactlClusterTest, DrainHandsSequencesToTheOthers) {
  Authority authority;
  const auto change = [&](server::Config& config) {
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = "blue,localhost";
    config.listen.unix_path = "";
  };
  const TestServer a(change), b(change), c(change);
  std::string addresses[3];
  for (int i = 0; i < 3; ++i) {
    const TestServer& server = *(std::array{&a, &b, &c})[static_cast<size_t>(i)];
    addresses[i] = absl::StrCat("localhost:", server.server().tcp_port());
  }
  const std::string target = absl::StrCat(addresses[0], ",", addresses[1], ",", addresses[2]);
  const std::string tls = absl::StrCat(" --tls-ca=", authority.File("ca.pem"),
                                       " --tls-cert=", authority.File("blue.pem"),
                                       " --tls-key=", authority.File("blue.key"));
  const auto red = client::Client::Connect(addresses[0], authority.As("red"));
  ASSERT_TRUE(red.ok()) << red.status();
  Worker worker(red->get(), Dims(), "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 2; ++i) {
    tracks.push_back(*worker.Open());
    ASSERT_EQ(worker.Step({&tracks.back()}, {50}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  Result result = Cluster(target, absl::StrCat("drain localhost:1", tls));
  EXPECT_EQ(result.code, 2) << "that is no server: " << result.output;
  result = Cluster(target, absl::StrCat("drain ", addresses[0], " --json --timeout-ms=20000", tls));
  EXPECT_EQ(result.code, 0) << result.output;
  const json reply = json::parse(result.output);
  // Both have the same room, so each gets one.
  ASSERT_EQ(reply["peers"].size(), 2u) << result.output;
  EXPECT_EQ(reply["left"], 0);
  for (const json& one : reply["peers"]) {
    EXPECT_EQ(one["moved"], 1) << result.output;
    const std::string peer = one["address"];
    EXPECT_NE(peer, addresses[0]);
    const auto there = client::Client::Connect(peer, authority.As("red"));
    EXPECT_EQ((*there)->GetSequences({}, /*own_only=*/false)->sequences_size(), 1);
  }
  for (Track& track : tracks) track.sequence.Detach();
  EXPECT_EQ(Cluster(target, "status --json" + tls).code, 4) << "one drains";
}

TEST(MlactlClusterTest, SaysWhatIsWrong) {
  EXPECT_EQ(Cluster("a,b", "nothing").code, 1);
  EXPECT_THAT(Cluster("a,b", "nothing").output,
              HasSubstr("status, sequences, top, drain or rebalance"));
  EXPECT_EQ(Cluster("a,b", "drain").code, 1);
  EXPECT_EQ(Cluster("a,b", "status a").code, 1);
  const Result away = Cluster("etcd://127.0.0.1:1/fleet", "status");
  EXPECT_EQ(away.code, 2) << away.output;
  EXPECT_THAT(away.output, HasSubstr("registry_away"));
  EXPECT_NE(Cluster("etcd://127.0.0.1:1", "status").code, 0);
}

}  // namespace
}  // namespace mla::integration
