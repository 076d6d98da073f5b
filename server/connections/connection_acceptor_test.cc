#include "server/connections/connection_acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/process/process_usage.h"

namespace mla::server {
namespace {

using std::chrono::milliseconds;

// In gRPC's place: keeps handed descriptors until the test closes them.
class Taken final : public grpc::experimental::ExternalConnectionAcceptor {
 public:
  explicit Taken(std::vector<int>* all, std::mutex* mutex) : all_(all), mutex_(mutex) {}
  void HandleNewConnection(NewConnectionParameters* handed) override {
    const std::lock_guard lock(*mutex_);
    all_->push_back(handed->fd);
  }

 private:
  std::vector<int>* const all_;
  std::mutex* const mutex_;
};

class ConnectionAcceptorTest : public ::testing::Test {
 protected:
  ~ConnectionAcceptorTest() override {
    acceptor_.reset();
    for (const int one : taken_) close(one);
    for (const int one : clients_) close(one);
    rmdir(folder_.c_str());
  }

  void Make(int32_t most, int32_t of_peer) {
    ConnectionBounds bounds;
    bounds.max_connections = most;
    bounds.peer_connections = of_peer;
    bounds.on_refused = [this] { ++refused_; };
    acceptor_ = std::make_unique<ConnectionAcceptor>(bounds);
  }
  ConnectionAcceptor::Handler Handler() { return std::make_unique<Taken>(&taken_, &mutex_); }
  void ServeUnix(int32_t most, int32_t of_peer) {
    Make(most, of_peer);
    ASSERT_EQ(acceptor_->ListenUnix(path_, Handler()), absl::OkStatus());
    ASSERT_EQ(acceptor_->Start(), absl::OkStatus());
  }

  int Connect() { return ConnectWith(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }
  int ConnectWith(int one) {
    clients_.push_back(one);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(one, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return one;
  }
  // From one loopback address to another.
  int ConnectTcp(const char* from, const char* destination, int port) {
    const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    clients_.push_back(one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, from, &address.sin_addr);
    EXPECT_EQ(bind(one, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    inet_pton(AF_INET, destination, &address.sin_addr);
    address.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(connect(one, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return one;
  }

  static bool Becomes(const std::function<bool()>& holds) {
    for (int i = 0; i < 20000 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(1));
    return holds();
  }
  static bool Closed(int client) {
    pollfd state{client, POLLIN | POLLRDHUP, 0};
    return poll(&state, 1, 20000) == 1 && (state.revents & (POLLRDHUP | POLLHUP)) != 0;
  }
  size_t taken() {
    const std::lock_guard lock(mutex_);
    return taken_.size();
  }
  void CloseTaken(size_t number) {
    const std::lock_guard lock(mutex_);
    close(taken_[number]);
    taken_.erase(taken_.begin() + static_cast<ptrdiff_t>(number));
  }

  char name_[21] = "/tmp/mla-conn-XXXXXX";
  const std::string folder_ = mkdtemp(name_);
  const std::string path_ = folder_ + "/s";
  std::mutex mutex_;
  std::vector<int> taken_, clients_;
  std::atomic<int> refused_{0};
  std::unique_ptr<ConnectionAcceptor> acceptor_;
};

TEST_F(ConnectionAcceptorTest, ABoundIsForOpenConnections) {
  ServeUnix(/*most=*/8, /*of_peer=*/3);
  for (int i = 0; i < 3; ++i) Connect();
  ASSERT_TRUE(Becomes([this] { return taken() == 3; }));
  EXPECT_TRUE(Closed(Connect()));
  EXPECT_EQ(refused_, 1);
  // A descriptor that now names another connection does not count, nor one that is not a socket.
  CloseTaken(1);
  const int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_TRUE(Becomes([this] {
    Connect();
    std::this_thread::sleep_for(milliseconds(5));
    return taken() == 3;
  }));
  EXPECT_TRUE(Closed(Connect()));
  EXPECT_EQ(taken(), 3u);
  close(other);
}

TEST_F(ConnectionAcceptorTest, AddressesArePeersOfTheirOwn) {
  Make(/*most=*/3, /*of_peer=*/2);
  const auto port = acceptor_->ListenTcp("127.0.0.1:0", Handler());
  ASSERT_TRUE(port.ok()) << port.status();
  ASSERT_EQ(acceptor_->Start(), absl::OkStatus());
  for (int i = 0; i < 2; ++i) ConnectTcp("127.0.0.1", "127.0.0.1", *port);
  ASSERT_TRUE(Becomes([this] { return taken() == 2; }));
  EXPECT_TRUE(Closed(ConnectTcp("127.0.0.1", "127.0.0.1", *port)));
  ConnectTcp("127.0.0.2", "127.0.0.1", *port);
  EXPECT_TRUE(Becomes([this] { return taken() == 3; }));
  EXPECT_TRUE(Closed(ConnectTcp("127.0.0.3", "127.0.0.1", *port)));  // the bound of all
  EXPECT_EQ(refused_, 2);
}

TEST_F(ConnectionAcceptorTest, DescriptorsOfTheReserveAreLeftAlone) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  ServeUnix(/*most=*/1000, /*of_peer=*/1000);
  rlimit few = before;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(DescriptorsForConnections(), 256 - 64);
  // Made before, so that the test needs none.
  std::vector<int> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::vector<int> fill;
  while (fill.empty() || fill.back() < 256 - 64 - 1) fill.push_back(dup(clients[0]));
  EXPECT_TRUE(Closed(ConnectWith(clients[0])));
  EXPECT_EQ(taken(), 0u);
  // Without any descriptor at all a connection waits, and so does the listener, until there is one.
  while (fill.back() >= 0) fill.push_back(dup(clients[1]));
  fill.pop_back();
  const int refused = refused_;
  ConnectWith(clients[1]);
  EXPECT_TRUE(Becomes([&] { return refused_ > refused; }));
  for (const int one : fill) close(one);
  EXPECT_TRUE(Becomes([this] { return taken() == 1; }));
  ConnectWith(clients[2]);
  EXPECT_TRUE(Becomes([this] { return taken() == 2; }));
  EXPECT_LT(refused_, 1000);  // it did not spin
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(ConnectionAcceptorTest, AddressesThatCannotBeBoundAreNamed) {
  Make(4, 4);
  const auto port = acceptor_->ListenTcp("localhost:0", Handler());
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_GT(*port, 0);
  for (const std::string& bad :
       {"127.0.0.1:" + std::to_string(*port), std::string("127.0.0.1"), std::string("192.0.2.1:0"),
        std::string("no.such.host.invalid:0"), std::string("127.0.0.1:no_port")}) {
    const auto refused = acceptor_->ListenTcp(bad, Handler());
    EXPECT_TRUE(absl::IsUnavailable(refused.status())) << bad;
    EXPECT_NE(refused.status().message().find(bad), std::string::npos) << refused.status();
  }
  const absl::Status nowhere = acceptor_->ListenUnix(folder_ + "/none/s", Handler());
  EXPECT_TRUE(absl::IsUnavailable(nowhere)) << nowhere;
}

TEST_F(ConnectionAcceptorTest, ItsSocketFileGoesWithIt) {
  ServeUnix(4, 4);
  struct stat there {};
  EXPECT_EQ(lstat(path_.c_str(), &there), 0);
  acceptor_->Stop();
  EXPECT_NE(lstat(path_.c_str(), &there), 0);
  acceptor_->Stop();
}

}  // namespace
}  // namespace mla::server
