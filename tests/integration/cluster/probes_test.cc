// Probes of several servers at once: who answers, who does not, and what it costs this process.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <thread>

#include "absl/strings/str_join.h"
#include "client/cpp/probes.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

int64_t ThreadsNow() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// The most threads that this process had while `act` ran.
int64_t MostThreadsDuring(const std::function<void()>& act) {
  std::atomic<bool> done{false};
  std::atomic<int64_t> most{0};
  std::thread watcher([&] {
    while (!done) most = std::max(most.load(), ThreadsNow());
  });
  act();
  done = true;
  watcher.join();
  return most;
}

TEST(ProbesTest, EachServerAnswersForItself) {
  TestServer a, b, c;
  const auto of_a = a.Connect(), of_b = b.Connect(), of_c = c.Connect();
  const Dims dims;
  ASSERT_TRUE(of_a->RegisterModel(SpecOf(dims, kModel)).ok());
  ASSERT_TRUE(of_c->RegisterModel(SpecOf(dims, kModel)).ok());
  c.Restart();
  const std::vector<client::Client*> all = {of_a.get(), of_b.get(), of_c.get()};
  const auto answers = client::Probes::Ask(all, kModel, PrefixOf(1, 200), 10000);
  ASSERT_EQ(answers.size(), 3u);
  ASSERT_TRUE(answers[0].ok()) << answers[0].status();
  EXPECT_EQ(answers[0]->boot_id(), of_a->info().boot_id());
  EXPECT_GT(answers[0]->rows_asked(), 0u);
  EXPECT_EQ(ReasonIn(answers[1].status()), "model_not_found") << answers[1].status();
  EXPECT_FALSE(answers[2].ok());
  // An answer of the new process ends the client, as with a probe of one.
  EXPECT_TRUE(Eventually([&] {
    return ReasonIn(client::Probes::Ask(all, "", {}, 10000)[2].status()) == "server_restarted";
  }));
  EXPECT_TRUE(client::Probes::Ask(all, "", {}, 10000)[1].ok());
  EXPECT_TRUE(client::Probes::Ask({}, kModel, {}, 1).empty());
}

TEST(ProbesTest, SilentServersArePassedOverAndCostNoThread) {
  std::vector<std::unique_ptr<ServerProcess>> servers;
  std::vector<std::string> addresses;
  for (int i = 0; i < 4; ++i) {
    servers.push_back(std::make_unique<ServerProcess>(std::vector<std::string>()));
    addresses.push_back(servers.back()->target());
  }
  client::ClusterOptions cluster;
  cluster.home = addresses[0];
  FleetWorker worker(absl::StrJoin(addresses, ","), {}, cluster);
  std::vector<std::shared_ptr<client::Client>> clients;
  for (const std::string& address : addresses) {
    clients.push_back(*worker.client().ServerAt(address));
  }
  // A prefix that belongs to other servers than the home, so that four are asked.
  v1::Prefix prefix;
  for (uint32_t first = 1; prefix.token_ids_size() == 0; first += 100) {
    const v1::Prefix one = PrefixOf(first, 64);
    const auto order = client::ByHash(client::KeyOfPrefix(kModel, one), addresses);
    if (order[0] != addresses[0] && order[1] != addresses[0]) prefix = one;
  }
  for (size_t i = 1; i < servers.size(); ++i) servers[i]->Signal(SIGSTOP);
  const int64_t before = ThreadsNow() + 1;  // with the watcher
  absl::StatusOr<client::ClusterSequence> opened = absl::UnknownError("not opened");
  const int64_t most =
      MostThreadsDuring([&] { opened = worker.client().OpenSequence(kModel, prefix); });
  EXPECT_LE(most, before + 1);  // gRPC may start one of its own
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->address(), addresses[0]);
  EXPECT_EQ(worker.client().counts().asked, 4u);
  const auto answers = client::Probes::Ask(
      std::vector<client::Client*>{clients[0].get(), clients[1].get()}, kModel, prefix, 50);
  EXPECT_TRUE(absl::IsDeadlineExceeded(answers[1].status())) << answers[1].status();
  for (size_t i = 1; i < servers.size(); ++i) servers[i]->Signal(SIGCONT);
}

}  // namespace
}  // namespace mla::integration
