// Measures the cost of the cluster's client: for each attend of a step with one owner, and for
// opening a sequence with a prefix among eight servers.
//
// A call that the library refuses before it sends anything shows the client's own time without that
// of a server and of the system. Calls that are answered are compared as well; the two kinds of
// client take turns. Exits 1 if the part of one owner is above kMostMicros.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/cluster_step.h"
#include "client/cpp/probes.h"
#include "tests/bench/json_flag.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/test_server.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;
using integration::TestServer;

constexpr double kMostMicros = 1.0;
constexpr int kRefused = 20000, kRounds = 15;
constexpr int kAnswered = 2000;
constexpr int kServers = 8, kOpens = 300;
constexpr uint32_t kPrefixRows = 1024;
constexpr int64_t kProbeMillis = 10000;
constexpr char kModel[] = "m";

double Micros(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double At(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::exit(2);
  }
  return *std::move(value);
}

// Microseconds of one call, by the fastest of some rounds.
template <typename Step>
double RefusedMicros(Step* step, const client::AttendCall& call) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto began = Clock::now();
    for (int i = 0; i < kRefused; ++i) {
      if (step->Attend(call).ok()) std::exit(2);
    }
    best = std::min(best, Micros(Clock::now() - began) / kRefused);
  }
  return best;
}

struct Pass {
  double refused_step = 0, refused_cluster = 0;    // us, of the fastest round
  double answered_step = 0, answered_cluster = 0;  // us, medians
};

Pass MeasurePass() {
  const integration::Dims dims;
  const TestServer server;
  const auto client = server.Connect();
  const auto cluster =
      Must(client::ClusterClient::Connect(server.unix_target(), client::ClientOptions()));
  Must(client->RegisterModel(integration::SpecOf(dims, kModel)));
  Must(cluster->RegisterModel(integration::SpecOf(dims, kModel)));
  auto one = Must(client->OpenSequence(kModel));
  auto other = Must(cluster->OpenSequence(kModel));
  const auto session = Must(client->OpenSession());
  const auto of_cluster = cluster->OpenSession();
  const auto step = Must(session->Begin(kModel, {{&one, 1}}));
  const auto cluster_step = Must(of_cluster->Begin(kModel, {{&other, 1}}));
  std::vector<std::byte> tensor(size_t{1} << 16);
  client::AttendCall call;
  call.row_count = 1;
  call.num_heads = static_cast<uint32_t>(dims.heads);
  call.profile = v1::PROFILE_ABSORBED;
  call.kv = call.q = tensor.data();
  call.o = tensor.data() + tensor.size() / 2;
  Must(step->Attend(call));
  Must(cluster_step->Attend(call));
  call.kv = nullptr;  // it is there
  std::vector<double> plain, passed;
  for (int i = 0; i < kAnswered; ++i) {
    auto began = Clock::now();
    Must(step->Attend(call));
    plain.push_back(Micros(Clock::now() - began));
    began = Clock::now();
    Must(cluster_step->Attend(call));
    passed.push_back(Micros(Clock::now() - began));
  }
  call.num_heads = 1u << 20;  // longer than any message
  return {RefusedMicros(step.get(), call), RefusedMicros(cluster_step.get(), call), At(plain, 0.5),
          At(passed, 0.5)};
}

struct Opens {
  double one_p50 = 0, one_p99 = 0, fleet_p50 = 0, fleet_p99 = 0;  // us
  double probe_p50 = 0, probes_p50 = 0;                           // us, of one and of four
};

Opens MeasureOpens() {
  std::vector<std::unique_ptr<TestServer>> servers;
  std::vector<std::string> addresses;
  for (int i = 0; i < kServers; ++i) {
    servers.push_back(std::make_unique<TestServer>());
    addresses.push_back(servers.back()->tcp_target());
  }
  const integration::Dims dims;
  client::ClusterOptions options;
  options.subset = 0;
  const auto cluster = Must(client::ClusterClient::Connect(absl::StrJoin(addresses, ","),
                                                           client::ClientOptions(), options));
  const auto single = Must(client::Client::Connect(addresses[0], client::ClientOptions()));
  Must(single->RegisterModel(integration::SpecOf(dims, kModel)));
  Must(cluster->RegisterModel(integration::SpecOf(dims, kModel)));
  std::vector<std::shared_ptr<client::Client>> kept;
  std::vector<client::Client*> asked;
  for (size_t i = 0; i < client::kMostCandidates; ++i) {
    kept.push_back(Must(cluster->ServerAt(addresses[i])));
    asked.push_back(kept.back().get());
    Must(asked.back()->RegisterModel(integration::SpecOf(dims, kModel)));
  }
  std::vector<double> one, fleet, probe, probes;
  for (int i = 0; i < kOpens; ++i) {
    v1::Prefix prefix;
    for (uint32_t row = 0; row < kPrefixRows; ++row) {
      prefix.add_token_ids(static_cast<uint32_t>(i) * kPrefixRows + row);
    }
    auto began = Clock::now();
    auto plain = Must(single->OpenSequence(kModel, "", prefix));
    one.push_back(Micros(Clock::now() - began));
    began = Clock::now();
    auto placed = Must(cluster->OpenSequence(kModel, prefix));
    // The first ones connect and register the model.
    if (i >= kOpens / 3) fleet.push_back(Micros(Clock::now() - began));
    began = Clock::now();
    Must(asked[0]->Probe(kModel, prefix));
    probe.push_back(Micros(Clock::now() - began));
    began = Clock::now();
    for (auto& answer : client::Probes::Ask(asked, kModel, prefix, kProbeMillis)) {
      Must(std::move(answer));
    }
    probes.push_back(Micros(Clock::now() - began));
  }
  return {At(one, 0.5),    At(one, 0.99),  At(fleet, 0.5),
          At(fleet, 0.99), At(probe, 0.5), At(probes, 0.5)};
}

int Main(const std::string& json) {
  const Pass pass = MeasurePass();
  const double overhead = pass.refused_cluster - pass.refused_step;
  std::printf("an attend of one owner: %.3f us more than a Step (%.3f, %.3f)\n", overhead,
              pass.refused_cluster, pass.refused_step);
  std::printf("answered, median: %.2f us by the cluster's client, %.2f us by a Step\n",
              pass.answered_cluster, pass.answered_step);
  const Opens opens = MeasureOpens();
  std::printf(
      "open with a prefix of %u rows: p50 %.0f us, p99 %.0f us among %d servers; "
      "p50 %.0f us, p99 %.0f us at one\n",
      kPrefixRows, opens.fleet_p50, opens.fleet_p99, kServers, opens.one_p50, opens.one_p99);
  std::printf("its probes, p50: %.0f us for %zu at once, %.0f us for one\n", opens.probes_p50,
              client::kMostCandidates, opens.probe_p50);
  if (!json.empty()) {
    std::ofstream(json) << absl::StrFormat(
        "[\n{\"shape\": \"attend of one owner\", \"overhead_us\": %.3f, \"us\": %.2f, "
        "\"step_us\": %.2f},\n{\"shape\": \"open among %d\", \"us\": %.1f, \"p99_us\": %.1f, "
        "\"one_us\": %.1f, \"one_p99_us\": %.1f, \"probes_us\": %.1f, \"probe_us\": %.1f}\n]\n",
        overhead, pass.answered_cluster, pass.answered_step, kServers, opens.fleet_p50,
        opens.fleet_p99, opens.one_p50, opens.one_p99, opens.probes_p50, opens.probe_p50);
  }
  return overhead <= kMostMicros ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  const auto json = mla::bench::ReadJsonFlag(argc, argv, "cluster_benchmark");
  return json ? mla::bench::Main(*json) : 2;
}
