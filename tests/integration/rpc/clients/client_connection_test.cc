// Tests how the C++ client and the C client reach a server: socket paths, proxies from the
// environment, connections that were lost, timeouts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/support/channel_arguments.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/c/mla_client.h"
#include "client/cpp/channel.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/rpc/clients/forgetful_relay.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

// Connects by the C library. Returns its answer.
mla_code ConnectC(const std::string& target, int64_t call_timeout_ms = 0) {
  mla_connect_options options{};
  options.struct_size = sizeof(options);
  options.call_timeout_ms = call_timeout_ms;
  mla_client* client = nullptr;
  const mla_code code = mla_connect(target.c_str(), &options, &client, nullptr);
  if (code == MLA_OK) mla_client_free(client);
  return code;
}

TEST(ClientConnectionTest, PathsOfSocketsMeanThemselves) {
  const TempFolder folder;
  for (const char* const name :
       {"plain", "50%off", "run#1", "what?", "a%2fb", "two words", "größe", "a&b=c;d"}) {
    const std::string path = absl::StrCat(folder.File(name), "/s.sock");
    std::filesystem::create_directory(folder.File(name));
    const TestServer server([&](server::Config& config) { config.listen.unix_path = path; });
    for (const char* const scheme : {"unix:", "unix://"}) {
      const auto client = client::Client::Connect(scheme + path, {});
      ASSERT_TRUE(client.ok()) << path << client.status();
      const auto session = (*client)->OpenSession();
      ASSERT_TRUE(session.ok()) << path << session.status();
      EXPECT_EQ((*session)->transport(), "ring") << path;
      EXPECT_EQ(ConnectC(scheme + path), MLA_OK) << path;
    }
  }
  const auto refused = client::Client::Connect("unix:/tmp/a,b/s.sock", {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
  EXPECT_EQ(ConnectC("unix:/tmp/a,b/s.sock"), MLA_INVALID_ARGUMENT);
}

// A port in place of a proxy, and the requests that it gets.
class Proxy {
 public:
  Proxy() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    const std::string url = absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port));
    for (const char* const name : kNames) setenv(name, url.c_str(), 1);
    unsetenv("no_proxy");
    unsetenv("no_grpc_proxy");
  }
  ~Proxy() {
    for (const char* const name : kNames) unsetenv(name);
    close(listener_);
  }
  // The bytes that have arrived, or nothing.
  std::string Asked() const {
    fcntl(listener_, F_SETFL, O_NONBLOCK);
    const int one = accept(listener_, nullptr, nullptr);
    if (one < 0) return "";
    char text[256];
    const ssize_t n = recv(one, text, sizeof(text), 0);
    close(one);
    return n > 0 ? std::string(text, static_cast<size_t>(n)) : "a connection";
  }

 private:
  static constexpr const char* kNames[] = {"http_proxy", "https_proxy", "grpc_proxy"};
  const int listener_;
};

TEST(ClientConnectionTest, ProxiesAreAskedForOtherHostsAlone) {
  const TestServer server;
  const Proxy proxy;
  client::ClientOptions options;
  options.call_timeout_ms = 1000;
  for (const bool wanted : {false, true}) {
    options.http_proxy = wanted;
    for (const std::string& target :
         {server.tcp_target(), server.unix_target(),
          absl::StrCat("localhost:", server.server().tcp_port()),
          absl::StrCat("dns:///127.0.0.1:", server.server().tcp_port()),
          absl::StrCat("ipv4:127.0.0.1:", server.server().tcp_port())}) {
      const auto client = client::Client::Connect(target, options);
      EXPECT_TRUE(client.ok()) << target << client.status();
      EXPECT_EQ(ConnectC(target), MLA_OK) << target;
      EXPECT_EQ(proxy.Asked(), "") << target;
    }
    // An address reserved for documentation, which has no host.
    EXPECT_FALSE(client::Client::Connect("192.0.2.1:50551", options).ok());
    EXPECT_EQ(proxy.Asked().substr(0, 23), wanted ? "CONNECT 192.0.2.1:50551" : "");
  }
  // The C library has no option for a proxy.
  EXPECT_EQ(ConnectC("192.0.2.1:50551", 1000), MLA_UNAVAILABLE);
  EXPECT_EQ(proxy.Asked(), "");
}

// By default a server serves 128 calls of one connection.
TEST(ClientConnectionTest, CallsDoNotWaitForSessions) {
  const TestServer server([](server::Config& config) {
    config.wire.connection_streams = 16;
    config.wire.max_streams = 100;
  });
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  options.call_timeout_ms = 5000;
  const auto client = server.Connect(options);
  std::vector<std::unique_ptr<client::Session>> sessions;
  for (int i = 0; i < 40; ++i) {
    sessions.push_back(*client->OpenSession());
    ASSERT_TRUE(client->GetStats().ok()) << i;
  }
  // A session that has ended frees its place for another.
  for (int i = 0; i < 200; ++i) {
    sessions[static_cast<size_t>(i) % sessions.size()] = *client->OpenSession();
  }
  const auto stats = client->GetStats();
  ASSERT_TRUE(stats.ok()) << stats.status();
}

// Runs the call until it does not say that the connection was lost, and returns its status. The
// first call after the loss ends when a probe has found it, which takes half a minute. The next
// calls fail at once until gRPC has made the connection again.
template <class Call>
absl::Status AfterLoss(const Call& call) {
  absl::Status status;
  for (int i = 0; i < 1000; ++i) {
    status = call();
    if (!absl::IsUnavailable(status)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return status;
}

// The same for an outage that `relay` makes. Prints the time from its end to the first answer.
template <class Call>
absl::Status AfterOutage(const ForgetfulRelay& relay, const Call& call) {
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> end;
  const absl::Status status = AfterLoss([&] {
    if (!end && relay.refusals_left() == 0) end = Clock::now();
    return call();
  });
  EXPECT_EQ(relay.refusals_left(), 0);
  const std::chrono::duration<double> back = end ? Clock::now() - *end : Clock::duration(0);
  std::printf("back %.2f s after the outage\n", back.count());
  return status;
}

// Without probes a call waits for its whole deadline, and so do all after it: nothing tells that
// packets vanish.
TEST(ClientConnectionTest, AConnectionThatWasForgottenIsMadeAgain) {
  const TestServer server;
  ForgetfulRelay relay(server.server().tcp_port());
  client::ClientOptions options;
  options.call_timeout_ms = options.request_timeout_ms = 300'000;
  options.sequence_lease_ms = 600'000;
  const auto client = client::Client::Connect(relay.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  Worker worker(client->get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());

  mla_connect_options c_options{};
  c_options.struct_size = sizeof(c_options);
  c_options.call_timeout_ms = c_options.request_timeout_ms = 300'000;
  c_options.sequence_lease_ms = 600'000;
  mla_client* c_client = nullptr;
  mla_sequence* c_sequence = nullptr;
  ASSERT_EQ(mla_connect(relay.target().c_str(), &c_options, &c_client, nullptr), MLA_OK);
  ASSERT_EQ(mla_sequence_open(c_client, "m", nullptr, &c_sequence, nullptr), MLA_OK);

  relay.Forget();
  absl::Status c_status;
  std::thread in_c([&] {
    c_status = AfterLoss([&] {
      mla_error* error = nullptr;
      const mla_code code = mla_sequence_refresh(c_sequence, &error);
      const absl::Status status(static_cast<absl::StatusCode>(code), mla_error_message(error));
      mla_error_free(error);
      return status;
    });
  });
  absl::Status lost;  // of the stream that the session had
  std::thread in_stream([&] {
    lost = worker.session().Begin("m", {{&track.sequence, 1}}).status();
  });
  EXPECT_EQ(AfterLoss([&] { return track.sequence.Refresh(); }), absl::OkStatus());
  in_c.join();
  in_stream.join();
  EXPECT_EQ(c_status, absl::OkStatus());
  EXPECT_TRUE(absl::IsUnavailable(lost)) << lost;
  Worker again(client->get(), {}, "m", 1);
  EXPECT_EQ(again.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  mla_sequence_free(c_sequence);
  mla_client_free(c_client);
}

// With gRPC's own pauses, up to two minutes, the tenth attempt would come after longer than
// AfterLoss waits. The time that is printed is that from the end of the outage to the first answer.
TEST(ClientConnectionTest, AServerThatIsBackIsFoundSoon) {
  // A sequence lives through both outages, however long they take on a loaded machine.
  const TestServer server([](server::Config& config) { config.limits.sequence_lease_ms = 120000; });
  ForgetfulRelay relay(server.server().tcp_port()), c_relay(server.server().tcp_port());
  const auto client = client::Client::Connect(relay.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->RegisterModel(SpecOf({}, "m")).ok());
  auto sequence = (*client)->OpenSequence("m");
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  mla_client* c_client = nullptr;
  mla_sequence* c_sequence = nullptr;
  ASSERT_EQ(mla_connect(c_relay.target().c_str(), nullptr, &c_client, nullptr), MLA_OK);
  ASSERT_EQ(mla_sequence_open(c_client, "m", nullptr, &c_sequence, nullptr), MLA_OK);

  constexpr int kAttempts = 10;
  const auto refresh_c = [&] {
    return absl::Status(static_cast<absl::StatusCode>(mla_sequence_refresh(c_sequence, nullptr)),
                        "");
  };
  relay.Refuse(kAttempts);
  EXPECT_EQ(AfterOutage(relay, [&] { return sequence->Refresh(); }), absl::OkStatus());
  c_relay.Refuse(kAttempts);
  EXPECT_EQ(AfterOutage(c_relay, refresh_c), absl::OkStatus());
  mla_sequence_free(c_sequence);
  mla_client_free(c_client);
}

// The reason of the first call that is answered by another process. Calls in between fail as
// UNAVAILABLE, because their connection has ended.
template <typename Act>
std::string ReasonOnceReplaced(Act act) {
  for (int i = 0; i < 1000; ++i) {
    const absl::Status status = act();
    const auto detail = client::DetailOf(status);
    if (absl::IsAborted(status)) return detail ? detail->reason() : "none";
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return "never";
}

TEST(ClientConnectionTest, AnotherServerAtTheAddressOfABalancerIsNoRestart) {
  TestServer a, b;
  // Far more than two answers may lie apart to count as one.
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  ForgetfulRelay balancer(a.server().tcp_port());
  const auto caller = client::Client::Connect(balancer.target(), {});
  const auto stepper = client::Client::Connect(balancer.target(), {});
  ASSERT_TRUE(caller.ok() && stepper.ok());
  Worker worker(stepper->get(), Dims(), "m", 1);
  auto track = worker.Open();
  ASSERT_TRUE(track.ok()) << track.status();
  balancer.To(b.server().tcp_port());
  balancer.Refuse(0);  // ends all connections
  EXPECT_EQ(ReasonOnceReplaced([&] { return (*caller)->GetStats().status(); }), "another_server");
  // It stays so, also where the first server answers again.
  balancer.To(a.server().tcp_port());
  balancer.Refuse(0);
  EXPECT_EQ(ReasonOnceReplaced([&] { return (*caller)->GetStats().status(); }), "another_server");
  track->sequence.Detach();
}

TEST(ClientConnectionTest, AStreamThatGoesToAnotherServerSaysSo) {
  TestServer a, b;
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  ForgetfulRelay balancer(a.server().tcp_port());
  const auto client = client::Client::Connect(balancer.target(), {});
  ASSERT_TRUE(client.ok());
  Worker worker(client->get(), Dims(), "m", 1);
  auto track = worker.Open();
  ASSERT_TRUE(track.ok()) << track.status();
  ASSERT_EQ(worker.Step({&*track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  balancer.To(b.server().tcp_port());
  balancer.Refuse(0);
  EXPECT_EQ(ReasonOnceReplaced([&] {
              const auto session = (*client)->OpenSession();
              if (!session.ok()) return session.status();
              return (*session)->Begin("m", {{&track->sequence, 1}}).status();
            }),
            "another_server");
  track->sequence.Detach();
}

TEST(ClientConnectionTest, AServerThatStartsAgainAtItsAddressIsARestart) {
  auto a = std::make_unique<TestServer>();
  ForgetfulRelay relay(a->server().tcp_port());
  const auto client = client::Client::Connect(relay.target(), {});
  ASSERT_TRUE(client.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  a = std::make_unique<TestServer>();
  relay.To(a->server().tcp_port());
  relay.Refuse(0);
  EXPECT_EQ(ReasonOnceReplaced([&] { return (*client)->GetStats().status(); }), "server_restarted");
}

TEST(ClientConnectionTest, PausesBetweenAttemptsAreShort) {
  const grpc::ChannelArguments arguments = client::ChannelArgumentsOf("host:1", {});
  const grpc_channel_args raw = arguments.c_channel_args();
  std::map<std::string, int> numbers;
  for (size_t i = 0; i < raw.num_args; ++i) {
    if (raw.args[i].type == GRPC_ARG_INTEGER) numbers[raw.args[i].key] = raw.args[i].value.integer;
  }
  EXPECT_EQ(numbers[GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS], 100);
  EXPECT_EQ(numbers[GRPC_ARG_MAX_RECONNECT_BACKOFF_MS], 1000);
  EXPECT_EQ(numbers[GRPC_ARG_MIN_RECONNECT_BACKOFF_MS], 5000);
  // gRPC reads an answer to a probe between calls up to 5 s later: a shorter time would end
  // connections that are well.
  EXPECT_EQ(numbers[GRPC_ARG_KEEPALIVE_TIMEOUT_MS], 2500);
  EXPECT_EQ(numbers[GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS], 0);
}

TEST(ClientConnectionTest, TimeoutsMayBeAsLongAsOneLikes) {
  const TestServer server;
  constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
  for (const auto transport :
       {client::ClientOptions::Transport::kInline, client::ClientOptions::Transport::kShm,
        client::ClientOptions::Transport::kRing}) {
    for (const int64_t timeout_ms : {kForever, kForever / 1'000'000, int64_t{1} << 32}) {
      client::ClientOptions options;
      options.transport = transport;
      options.call_timeout_ms = options.request_timeout_ms = timeout_ms;
      const auto client = server.Connect(options);
      Worker worker(client.get(), {}, "m", 1);
      Track track = *worker.Open();
      EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus()) << timeout_ms;
    }
  }
  EXPECT_EQ(ConnectC(server.unix_target(), kForever), MLA_OK);
  EXPECT_EQ(ConnectC(server.unix_target(), -1), MLA_INVALID_ARGUMENT);
  client::ClientOptions options;
  options.request_timeout_ms = -1;
  const auto refused = client::Client::Connect(server.unix_target(), options);
  EXPECT_EQ(refused.status().message(), "request_timeout_ms: got -1, must be at least 0");
}

}  // namespace
}  // namespace mla::integration
