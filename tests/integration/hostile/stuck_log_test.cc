// A log whose reader has stopped reading: the server goes on, and ends when it is told to.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

using ::testing::HasSubstr;

// A pipe of one page, which only the test reads.
class StuckPipe {
 public:
  StuckPipe() {
    EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    EXPECT_GT(fcntl(ends_[1], F_SETPIPE_SZ, 4096), 0);
  }
  ~StuckPipe() {
    close(ends_[0]);
    CloseWriter();
  }
  int writer() const { return ends_[1]; }
  void CloseWriter() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }
  void Fill() const {
    const std::string page(4096, 'x');
    const int flags = fcntl(ends_[1], F_GETFL);
    fcntl(ends_[1], F_SETFL, flags | O_NONBLOCK);
    for (const size_t size : {page.size(), size_t{1}}) {
      while (write(ends_[1], page.data(), size) > 0) {
      }
    }
    fcntl(ends_[1], F_SETFL, flags);
  }
  // Reads until every writer has closed the pipe, or until `text` has arrived.
  std::string ReadUntil(const std::string& text) const {
    std::string all, buffer(4096, '\0');
    for (ssize_t n; all.find(text) == std::string::npos &&
                    (n = read(ends_[0], buffer.data(), buffer.size())) > 0;) {
      all.append(buffer.data(), static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int ends_[2] = {-1, -1};
};

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int FreePort() {
  const int one = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(one, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(one, reinterpret_cast<sockaddr*>(&address), &size);
  close(one);
  return ntohs(address.sin_port);
}

class StuckLogTest : public ::testing::Test {
 protected:
  StuckLogTest()
      : server_({absl::StrCat("--listen=127.0.0.1:", port_), "--wire-peer-connections=2",
                 "--server-drain-deadline-ms=2000", "--log-level=debug"},
                pipe_.writer()) {
    pipe_.Fill();
  }
  std::string tcp() const { return absl::StrCat("127.0.0.1:", port_); }
  static bool Connects(const std::string& target) {
    return client::Client::Connect(target, {}).ok();
  }

  StuckPipe pipe_;
  const int port_ = FreePort();
  ServerProcess server_;
};

TEST_F(StuckLogTest, CallsConnectionsAndTheEndGoOn) {
  // The thread that accepts connections logs refused ones.
  std::vector<int> held;
  for (int i = 0; i < 6; ++i) {
    held.push_back(socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = Loopback(port_);
    EXPECT_EQ(connect(held.back(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
  }
  EXPECT_TRUE(Connects(server_.target()));
  for (const int one : held) close(one);
  bool connected = false;
  for (int i = 0; i < 100 && !connected; ++i) {
    connected = Connects(tcp());
    if (!connected) usleep(50000);
  }
  EXPECT_TRUE(connected);
  // Calls are logged, too; these are more than the pipe holds.
  const auto client = *client::Client::Connect(server_.target(), {});
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(client->GetStats().ok()) << i;
  server_.Signal(SIGTERM);
  EXPECT_EQ(server_.Wait(), 0);
}

TEST_F(StuckLogTest, LinesComeAgainWhenTheReaderDoes) {
  const auto client = *client::Client::Connect(server_.target(), {});
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(client->GetStats().ok()) << i;
  pipe_.CloseWriter();
  const std::string log = pipe_.ReadUntil("log_dropped");
  EXPECT_THAT(log + pipe_.ReadUntil("\n"), HasSubstr("warning log_dropped lines="));
  server_.Signal(SIGTERM);
  EXPECT_THAT(pipe_.ReadUntil("no such text"), HasSubstr("info signal number=15"));
  EXPECT_EQ(server_.Wait(), 0);
}

}  // namespace
}  // namespace mla::integration
