// Tests who may call operator RPCs without TLS. Peers of this machine look to the server like peers
// of another one, because gRPC takes a peer's address from getpeername, which the test replaces.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <map>
#include <string>

#include "client/cpp/streams/errors.h"
#include "server/grpc/identity.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace {

std::atomic<bool> from_elsewhere{false};

}  // namespace

// Replaces the C library's function, from which gRPC learns a connection's peer.
extern "C" int getpeername(int descriptor, sockaddr* address, socklen_t* length) noexcept {
  using GetPeerName = int (*)(int, sockaddr*, socklen_t*);
  static const auto real = reinterpret_cast<GetPeerName>(dlsym(RTLD_NEXT, "getpeername"));
  const int result = real(descriptor, address, length);
  if (result != 0 || !from_elsewhere) return result;
  if (address->sa_family == AF_INET) {
    inet_pton(AF_INET, "192.0.2.7", &reinterpret_cast<sockaddr_in*>(address)->sin_addr);
  } else if (address->sa_family == AF_INET6) {
    inet_pton(AF_INET6, "::ffff:192.0.2.7", &reinterpret_cast<sockaddr_in6*>(address)->sin6_addr);
  }
  return result;
}

namespace mla::integration {
namespace {

class OperatorsTest : public ::testing::Test {
 protected:
  ~OperatorsTest() override { from_elsewhere = false; }
};

absl::StatusOr<v1::DrainReply> DrainFrom(const std::string& target) {
  auto client = client::Client::Connect(target, {});
  if (!client.ok()) return client.status();
  return (*client)->Drain(100, false);
}

TEST_F(OperatorsTest, OtherHostsWithoutTlsCannotDrain) {
  const TestServer server([](server::Config& config) { config.listen.operators = "default"; });
  from_elsewhere = true;
  const auto refused = DrainFrom(server.tcp_target());
  EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
  const auto detail = client::DetailOf(refused.status());
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->reason(), "not_an_operator");
  EXPECT_EQ(detail->field(), "caller");
  EXPECT_FALSE(detail->limit().empty());
  from_elsewhere = false;
  EXPECT_TRUE(*server.Connect()->IsServing());
}

TEST_F(OperatorsTest, CallersOfThisHostCan) {
  for (const bool unix_socket : {false, true}) {
    const TestServer server;
    const auto drained = DrainFrom(unix_socket ? server.unix_target() : server.tcp_target());
    EXPECT_TRUE(drained.ok() && drained->drained()) << drained.status();
  }
}

TEST_F(OperatorsTest, TheConfigurationMayAllowOtherHosts) {
  const TestServer server([](server::Config& config) { config.listen.plain_operators = "any"; });
  from_elsewhere = true;
  const auto drained = DrainFrom(server.tcp_target());
  EXPECT_TRUE(drained.ok()) << drained.status();
}

TEST_F(OperatorsTest, TheConfigurationMayRefuseCallersOfThisHost) {
  const TestServer server([](server::Config& config) { config.listen.plain_operators = "none"; });
  for (const std::string& target : {server.unix_target(), server.tcp_target()}) {
    const auto refused = DrainFrom(target);
    EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
  }
  EXPECT_TRUE(*server.Connect()->IsServing());
}

TEST_F(OperatorsTest, OnlyTheySeeEventsOfAllTenants) {
  const TestServer server([](server::Config& config) { config.listen.plain_operators = "none"; });
  const auto client = server.Connect();
  const auto take = [](const v1::WatchEventsReply&) { return false; };
  EXPECT_TRUE(client->WatchEvents(0, take).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(client->WatchEvents(0, take, /*all_tenants=*/true)));
  EXPECT_TRUE(client->Explain(1).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(client->Explain(1, /*all_tenants=*/true).status()));
}

TEST_F(OperatorsTest, OnlyTheyListSequencesOfAllTenants) {
  const TestServer server([](server::Config& config) { config.listen.plain_operators = "none"; });
  for (const std::string& target : {server.unix_target(), server.tcp_target()}) {
    const auto client = client::Client::Connect(target, {});
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_TRUE((*client)->GetSequences({}, false).ok());
    const auto refused = (*client)->GetAllSequences();
    EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
    const auto detail = client::DetailOf(refused.status());
    ASSERT_TRUE(detail.has_value());
    EXPECT_EQ(detail->reason(), "not_an_operator");
  }
}

TEST_F(OperatorsTest, AListOfAllTenantsIsWholeHoweverLong) {
  const TestServer server([](server::Config& config) { config.limits.max_sequences = 3000; });
  std::map<uint64_t, std::string> owners;
  for (const std::string tenant : {"red", "blue"}) {
    client::ClientOptions options;
    options.tenant = tenant;
    const auto client = server.Connect(options);
    const Worker worker(client.get(), {}, "m", 1);
    for (int i = 0; i < 600; ++i) {  // of both together more than one answer has
      auto sequence = client->OpenSequence("m");
      ASSERT_TRUE(sequence.ok()) << sequence.status();
      owners[sequence->id()] = tenant;
      sequence->Detach();
    }
  }
  const auto all = server.Connect()->GetAllSequences();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->sequences_size(), 1200);
  for (const v1::SequenceInfo& one : all->sequences()) {
    EXPECT_EQ(one.tenant(), owners[one.sequence_id()]);
    EXPECT_TRUE(one.has_age_ms());
  }
}

TEST(LocalPeerTest, UnixSocketsAndLoopbackAreLocal) {
  for (const char* local :
       {"unix:/run/mla.sock", "unix:", "ipv4:127.0.0.1:1", "ipv4:127.9.9.9:65535", "ipv6:[::1]:9",
        "ipv6:%5B::1%5D:9", "ipv6:[::ffff:127.0.0.1]:9", "ipv6:%5B::ffff:127.0.0.1%5D:9"}) {
    EXPECT_TRUE(server::IsLocalPeer(local)) << local;
  }
  for (const char* other :
       {"", "ipv4:10.0.0.1:1", "ipv4:128.127.0.1:1", "ipv6:[::2]:1", "ipv6:[::1:1]:9",
        "ipv6:[fe80::1]:1", "ipv6:%5B::ffff:10.0.0.1%5D:1", "vsock:2:1", "127.0.0.1:1"}) {
    EXPECT_FALSE(server::IsLocalPeer(other)) << other;
  }
}

}  // namespace
}  // namespace mla::integration
