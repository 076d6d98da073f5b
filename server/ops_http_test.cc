// The operations port: its paths, stalled clients, the status page.
#include "server/ops_http.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "server/status_page.h"

namespace mla::server {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(OpsHttpTest, AnswersFixedPathsOnly) {
  auto port =
      OpsHttp::Start("127.0.0.1:0", 2, {{"/a", [](const std::string& query) {
                                           return HttpReply{200, "text/plain", "a?" + query};
                                         }}});
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_GT((*port)->port(), 0);
  EXPECT_EQ((*port)->Answer("GET", "/a", "x=1").body, "a?x=1");
  EXPECT_EQ((*port)->Answer("GET", "/a/", "").status, 404);
  EXPECT_EQ((*port)->Answer("GET", "/../a", "").status, 404);
  EXPECT_EQ((*port)->Answer("DELETE", "/a", "").status, 405);
  const std::string taken = "127.0.0.1:" + std::to_string((*port)->port());
  EXPECT_TRUE(absl::IsUnavailable(OpsHttp::Start(taken, 2, {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(OpsHttp::Start("host", 2, {}).status()));
}

// A connection to the port that sends `text` and may wait for more.
class HttpPeer {
 public:
  HttpPeer(int port, const std::string& text) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval most{2, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    Send(text);
  }
  ~HttpPeer() { close(fd_); }
  HttpPeer(const HttpPeer&) = delete;
  HttpPeer& operator=(const HttpPeer&) = delete;
  bool Send(const std::string& text) const {
    return send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  // What comes within two seconds; "" for nothing, or the end.
  std::string Receive() const {
    char buffer[4096];
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    return got > 0 ? std::string(buffer, static_cast<size_t>(got)) : "";
  }
  // The other side has closed the connection.
  bool Closed() const {
    char byte = 0;
    const ssize_t got = recv(fd_, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  }

 private:
  const int fd_;
};

constexpr char kProbe[] = "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n";

std::unique_ptr<OpsHttp> PortWithProbe() {
  auto port = OpsHttp::Start("127.0.0.1:0", 2, {{"/livez", [](const std::string&) {
                                                   return HttpReply{200, "text/plain", "alive"};
                                                 }}});
  EXPECT_TRUE(port.ok()) << port.status();
  return *std::move(port);
}

TEST(OpsHttpTest, StalledConnectionsDoNotKeepProbesOut) {
  const auto port = PortWithProbe();
  std::vector<std::unique_ptr<HttpPeer>> stalled;
  for (int round = 0; round < 10; ++round) {
    // Silent ones, and ones within their header.
    for (int i = 0; i < 20; ++i) {
      stalled.push_back(
          std::make_unique<HttpPeer>(port->port(), i % 2 == 0 ? "" : "GET /livez HTTP/1.1\r\nA"));
    }
    EXPECT_THAT(HttpPeer(port->port(), kProbe).Receive(), HasSubstr("alive")) << round;
  }
}

TEST(OpsHttpTest, HeadersThatTrickleAreCut) {
  const auto port = PortWithProbe();
  const HttpPeer trickle(port->port(), "GET /livez HTTP/1.1\r\n");
  const HttpPeer kept(port->port(), kProbe);
  EXPECT_THAT(kept.Receive(), HasSubstr("alive"));
  bool closed = false;
  for (int i = 0; i < 200 && !closed; ++i) {
    trickle.Send("X");
    std::this_thread::sleep_for(milliseconds(50));
    closed = trickle.Closed();
    if (i % 20 == 0) {
      // A connection that asks again stays.
      EXPECT_TRUE(kept.Send(kProbe));
      EXPECT_THAT(kept.Receive(), HasSubstr("alive"));
    }
  }
  EXPECT_TRUE(closed);
  EXPECT_TRUE(kept.Send(kProbe));
  EXPECT_THAT(kept.Receive(), HasSubstr("alive"));
}

TEST(StatusPageTest, EscapesAndAgrees) {
  const std::vector<StatusSection> sections = {
      {"s<1>", {{"name", std::string("<script>\"&")}}},
      {"two words", {{"a count", uint64_t{18446744073709551615u}}, {"is so", true}}}};
  EXPECT_THAT(StatusHtml(sections), HasSubstr("&lt;script&gt;&quot;&amp;"));
  EXPECT_THAT(StatusHtml(sections), Not(HasSubstr("<script>")));
  EXPECT_THAT(StatusHtml(sections), HasSubstr("is so</th><td>yes<"));
  const auto json = nlohmann::json::parse(StatusJson(sections));
  EXPECT_EQ(json["s<1>"]["name"], "<script>\"&");
  EXPECT_EQ(json["two_words"]["a_count"], 18446744073709551615u);
  EXPECT_EQ(json["two_words"]["is_so"], true);
}

}  // namespace
}  // namespace mla::server
