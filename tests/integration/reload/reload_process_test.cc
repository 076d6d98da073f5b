// A server whose configuration changes while it runs, and what it tells its service manager.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using ::testing::HasSubstr;

// Returns true once `condition` holds, within ten seconds.
bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 200; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

bool Says(const ServerProcess& process, const std::string& text) {
  return Eventually([&] { return process.Log().find(text) != std::string::npos; });
}

// As editors and Kubernetes do it: another file takes the name.
void Replace(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  ASSERT_EQ(rename((path + ".new").c_str(), path.c_str()), 0);
}

uint64_t BoundOfSequences(client::Client* client) {
  const auto reply = client->GetQuota();
  if (!reply.ok()) return 0;
  for (const v1::QuotaUsage& usage : reply->tenants(0).resources()) {
    if (usage.name() == "sequences") return usage.bound();
  }
  return 0;
}

TEST(ReloadProcessTest, AChangedFileIsInForceWithoutARestart) {
  const TempFolder folder;
  const std::string file = folder.File("server.yaml");
  Replace(file, "tenants: {sequences: 5}\n");
  ServerProcess process({"--config=" + file});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(BoundOfSequences(client->get()), 5u);
  Replace(file,
          "tenants: {sequences: 7, quotas: {other: {sequences: 3}}}\n"
          "server: {plain_operators: none}\nlimits: {sequence_lease_ms: 12000}\n"
          "log: {level: debug}\n");
  EXPECT_TRUE(Eventually([&] { return BoundOfSequences(client->get()) == 7; })) << process.Log();
  EXPECT_TRUE(Says(process, "info config_reloaded keys=")) << process.Log();
  EXPECT_TRUE(absl::IsPermissionDenied((*client)->Drain(1000, false).status()));
  EXPECT_EQ((*client)->GetServerInfo()->limits().sequence_lease_ms(), 12000u);
  EXPECT_TRUE(Says(process, "debug ")) << process.Log();
  // The sequence is where it was.
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ((*client)->GetServerInfo()->boot_id(), (*client)->info().boot_id());
}

TEST(ReloadProcessTest, AFaultRefusesTheWholeFile) {
  const TempFolder folder;
  const std::string file = folder.File("server.yaml");
  Replace(file, "tenants: {sequences: 5}\n");
  ServerProcess process({"--config=" + file});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Replace(file, "tenants: {sequences: 7}\nlimits: {max_models: 3}\n");
  process.Signal(SIGHUP);
  EXPECT_TRUE(Says(process, "error config_reload_refused why=")) << process.Log();
  EXPECT_THAT(process.Log(), HasSubstr("limits.max_models: only a restart changes this"));
  EXPECT_EQ(BoundOfSequences(client->get()), 5u);
  Replace(file, "tenants: {sequences: 8}\n");
  process.Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return BoundOfSequences(client->get()) == 8; })) << process.Log();
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ReloadProcessTest, ADrainWithoutADeadlineTakesTheOneInForce) {
  const TempFolder folder;
  const std::string file = folder.File("server.yaml");
  Replace(file, "server: {drain_deadline_ms: 3600000}\n");
  ServerProcess process({"--config=" + file});
  auto client = client::Client::Connect(process.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  Replace(file, "server: {drain_deadline_ms: 1}\n");
  process.Signal(SIGHUP);
  ASSERT_TRUE(Says(process, "info config_reloaded keys=server.drain_deadline_ms")) << process.Log();
  client::BeginOptions options;
  options.lease_ms = 20000;  // by the first deadline the drain would wait until the lease ends
  auto step = worker.session().Begin("m", {{&track.sequence, 1}}, options);
  ASSERT_TRUE(step.ok()) << step.status();
  const auto drained = (*client)->Drain(0, false);
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_FALSE(drained->drained());
  EXPECT_EQ(drained->aborted_steps(), 1u) << drained->ShortDebugString();
}

// The socket of a service manager; the environment names it.
class Manager {
 public:
  Manager() {
    name_ = absl::StrCat("@mla-manager-", getpid());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name_.data() + 1, name_.size() - 1);
    handle_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    timeval wait{10, 0};
    setsockopt(handle_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    EXPECT_EQ(bind(handle_, reinterpret_cast<const sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name_.size())),
              0);
    setenv("NOTIFY_SOCKET", name_.c_str(), 1);
  }
  ~Manager() {
    unsetenv("NOTIFY_SOCKET");
    close(handle_);
  }

  // Returns true once a text that begins so has come; others before it are left out.
  bool Hears(const std::string& begin) {
    char text[512];
    for (int i = 0; i < 1000; ++i) {
      const ssize_t size = recv(handle_, text, sizeof(text), 0);
      if (size < 0) return false;
      if (std::string(text, static_cast<size_t>(size)).rfind(begin, 0) == 0) return true;
    }
    return false;
  }

 private:
  std::string name_;
  int handle_ = -1;
};

TEST(ReloadProcessTest, TheServiceManagerIsToldWhatHappens) {
  Manager manager;
  ServerProcess process({});
  EXPECT_TRUE(manager.Hears("READY=1\nSTATUS=serving")) << process.Log();
  EXPECT_TRUE(manager.Hears("WATCHDOG=1"));
  process.Signal(SIGHUP);
  EXPECT_TRUE(manager.Hears("RELOADING=1\nMONOTONIC_USEC="));
  EXPECT_TRUE(manager.Hears("READY=1\nSTATUS=serving"));
  process.Signal(SIGTERM);
  EXPECT_TRUE(manager.Hears("STOPPING=1"));
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace mla::integration
