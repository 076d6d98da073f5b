// How the C++ client reaches a server: socket paths, proxies from the environment, connections.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

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
    }
  }
  const auto refused = client::Client::Connect("unix:/tmp/a,b/s.sock", {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
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
      EXPECT_EQ(proxy.Asked(), "") << target;
    }
    // An address reserved for documentation, which has no host.
    EXPECT_FALSE(client::Client::Connect("192.0.2.1:50551", options).ok());
    EXPECT_EQ(proxy.Asked().substr(0, 23), wanted ? "CONNECT 192.0.2.1:50551" : "");
  }
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

}  // namespace
}  // namespace mla::integration
