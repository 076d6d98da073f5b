// The operations port: its paths, stalled clients, the status page.
#include "server/operations/ops_http.h"

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

#include "server/operations/status_page.h"

namespace mla::server {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(OpsHttpTest, AnswersFixedPathsOnly) {
  auto port = OpsHttp::Start("127.0.0.1:0", 2,
                             {{"/a", [](const HttpRequest& request) {
                                 return HttpReply{200, "text/plain", "a?" + request.query};
                               }}});
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_GT((*port)->port(), 0);
  EXPECT_EQ((*port)->Answer("GET", "/a", {"x=1", ""}).body, "a?x=1");
  EXPECT_EQ((*port)->Answer("GET", "/a/", {}).status, 404);
  EXPECT_EQ((*port)->Answer("GET", "/../a", {}).status, 404);
  EXPECT_EQ((*port)->Answer("DELETE", "/a", {}).status, 405);
  const std::string taken = "127.0.0.1:" + std::to_string((*port)->port());
  const absl::Status refused = OpsHttp::Start(taken, 2, {}).status();
  EXPECT_TRUE(absl::IsUnavailable(refused));
  EXPECT_THAT(refused.message(), HasSubstr(taken + ": Address already in use"));
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
  // Bytes that arrive within two seconds; "" for none, or the end.
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
  auto port = OpsHttp::Start("127.0.0.1:0", 2, {{"/livez", [](const HttpRequest&) {
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

TEST(OpsHttpTest, HeadersThatTrickleAreDisconnected) {
  const auto port = PortWithProbe();
  const HttpPeer trickle(port->port(), "GET /livez HTTP/1.1\r\n");
  bool closed = false;
  for (int i = 0; i < 200 && !closed; ++i) {
    trickle.Send("X");
    std::this_thread::sleep_for(milliseconds(50));
    closed = trickle.Closed();
    if (i % 20 == 0) {
      EXPECT_THAT(HttpPeer(port->port(), kProbe).Receive(), HasSubstr("alive"));
    }
  }
  EXPECT_TRUE(closed);
}

// A proxy before the port may see another end of a request than the port does.
TEST(OpsHttpTest, NothingAfterARequestBecomesAnother) {
  const auto port = PortWithProbe();
  const std::string probe = "GET /livez HTTP/1.1\r\nHost: x\r\n";
  const std::string hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n";
  for (const std::string& refused :
       {probe + "Content-Length: 4\r\n\r\nbody",
        probe + "Content-Length: 0\r\nContent-Length: 4\r\n\r\n",
        probe + "Content-Length: 4\r\nContent-Length: 0\r\n\r\nbody",
        probe + "Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
        probe + "Content-Length: 0, 4\r\n\r\n", probe + "Content-Length: +0\r\n\r\n",
        probe + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        probe + "Transfer-Encoding: identity\r\n\r\n",
        probe + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        std::string("GET /livez HTTP/1.1\r\n\r\n")}) {
    const HttpPeer peer(port->port(), refused);
    const std::string reply = peer.Receive();
    EXPECT_THAT(reply, HasSubstr("HTTP/1.1 400 ")) << refused;
    EXPECT_THAT(reply, Not(HasSubstr("alive"))) << refused;
  }
  for (const std::string& first : {probe + "\r\n", probe + "Content-Length: 0\r\n\r\n",
                                   std::string("GET /livez HTTP/1.1\nHost: x\n\n"),
                                   probe + "Connection: keep-alive\r\n\r\n"}) {
    const HttpPeer peer(port->port(), first + hidden);
    std::string all;
    for (std::string some; !(some = peer.Receive()).empty();) all += some;
    EXPECT_THAT(all, HasSubstr("Connection: close")) << first;
    EXPECT_EQ(all.find("HTTP/1.1", 9), std::string::npos) << all;
    EXPECT_THAT(all, Not(HasSubstr("404"))) << first;
  }
}

StatusPage HostilePage() {
  const std::string name = "<script>\"&'</td></table><img src=x onerror=alert(1)>";
  StatusPage page;
  page.state = page.message = page.version = page.backend = page.window = name;
  page.tiles = {{name, name, name}};
  page.meters = {{name, 3, 4, true, name}, {name, 5, 0, false, name}};
  page.tenants = {{name, {{name, 1, 2, false, name}}}};
  page.models = {{name, name, name, 1, 2}};
  page.sections = {{name, {{name, name}}},
                   {"two words", {{"a count", uint64_t{18446744073709551615u}}, {"is so", true}}}};
  page.links = {{"/x", name}};
  return page;
}

TEST(StatusPageTest, EscapesEveryText) {
  const std::string html = StatusHtml(HostilePage());
  for (const char* part : {"<script", "<img", "onerror=alert(1)>"}) {
    EXPECT_THAT(html, Not(HasSubstr(part)));
  }
  const std::string escaped =
      "&lt;script&gt;&quot;&amp;&#39;&lt;/td&gt;&lt;/table&gt;&lt;img src=x onerror=alert(1)&gt;";
  size_t count = 0;
  for (size_t at = 0; (at = html.find(escaped, at)) != std::string::npos; ++at) ++count;
  // Twice the state, and twice the names of meters with a bound: as a text and as a label.
  EXPECT_EQ(count, 24u);
  EXPECT_THAT(html, HasSubstr("width:75.0%"));
  EXPECT_THAT(html, HasSubstr("is so</th><td>yes<"));
  EXPECT_THAT(html, HasSubstr("http-equiv=\"refresh\" content=\"5\""));
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(html, Not(HasSubstr("http://")));  // the page loads nothing from elsewhere
  EXPECT_THAT(html, Not(HasSubstr("https://")));
}

TEST(StatusPageTest, JsonHasTheSameAsNumbers) {
  const StatusPage page = HostilePage();
  const auto json = nlohmann::json::parse(StatusJson(page));
  EXPECT_EQ(json["two_words"]["a_count"], 18446744073709551615u);
  EXPECT_EQ(json["two_words"]["is_so"], true);
  EXPECT_EQ(json["tenants"][0]["name"], page.tenants[0].name);
  EXPECT_EQ(json["models"][0]["layers"], 1);
  StatusPage plain;
  plain.meters = {{"KV page pool", 3, 4, true, ""}};
  EXPECT_EQ(nlohmann::json::parse(StatusJson(plain))["limits"]["KV_page_pool"]["bound"], 4);
}

TEST(StatusPageTest, TenantsAreBounded) {
  StatusPage page;
  for (int i = 0; i < 150; ++i) page.tenants.push_back({"t" + std::to_string(i), {}});
  page.tenants_left_out = 7;
  const std::string html = StatusHtml(page);
  EXPECT_THAT(html, HasSubstr(">t99<"));
  EXPECT_THAT(html, Not(HasSubstr(">t100<")));
  EXPECT_THAT(html, HasSubstr("and 57 more"));
}

TEST(StatusPageTest, FiguresHaveUnits) {
  EXPECT_EQ(DurationText(59), "59 s");
  EXPECT_EQ(DurationText(3599), "59 min 59 s");
  EXPECT_EQ(DurationText(3600), "1 h 0 min");
  EXPECT_EQ(DurationText(90000), "1 d 1 h");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.00 KiB");
  EXPECT_EQ(BytesText(1536.0 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(NumberText(0), "0");
  EXPECT_EQ(NumberText(0.25), "0.25");
  EXPECT_EQ(NumberText(999), "999");
  EXPECT_EQ(NumberText(1234567), "1,234,567");
  EXPECT_EQ(LatencyText(180e-6), "180 us");
  EXPECT_EQ(LatencyText(1.25e-3), "1.2 ms");
  EXPECT_EQ(LatencyText(3.4), "3.4 s");
}

TEST(RateWindowTest, RatesAreOfTheLastMinute) {
  using std::chrono::seconds;
  const RateWindow::Clock::time_point start{};
  RateWindow rates(start);
  StatusTotals totals;
  totals.bounds = {1e-3, 2e-3};
  totals.latency = totals.queue = {0, 0, 0};
  std::string window;
  const auto tile = [&](int64_t at, size_t index) {
    return rates.Tiles(start + seconds(at), totals, &window)[index];
  };
  // 10 rows a second for 100 s, then 100 a second for 60 s.
  for (int64_t moment = 1; moment <= 160; ++moment) {
    totals.rows_decode += moment <= 100 ? 10 : 100;
    rates.Note(start + seconds(moment), totals);
    if (moment != 30) continue;
    EXPECT_EQ(tile(30, 0).value, "10 /s");
    EXPECT_EQ(window, "Rates and times of the last 30 s");
  }
  EXPECT_EQ(tile(160, 0).value, "100 /s");
  EXPECT_EQ(window, "Rates and times of the last 1 min 0 s");
  EXPECT_EQ(tile(160, 2).note, "no Attend in this time");
  // Only calls in the window count: 4 below 1 ms, 6 between 1 and 2 ms.
  totals.latency = {4, 10, 10};
  EXPECT_EQ(tile(160, 2).value, "1.2 ms");
  // The window moves on, so old calls leave it.
  for (int64_t at = 161; at <= 230; ++at) rates.Note(start + seconds(at), totals);
  EXPECT_EQ(tile(230, 0).value, "0 /s");
  EXPECT_EQ(tile(230, 2).note, "no Attend in this time");
}

}  // namespace
}  // namespace mla::server
