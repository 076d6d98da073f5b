// A proxy whose first connection breaks.
#ifndef MLA_TESTS_INTEGRATION_HAND_OVER_CUTTING_PROXY_H_
#define MLA_TESTS_INTEGRATION_HAND_OVER_CUTTING_PROXY_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace mla::integration {

// Forwards connections to a port of this host. The first one is cut after `bytes` bytes from its
// client; later ones go to the port `then`.
class CuttingProxy final {
 public:
  CuttingProxy(int port, int64_t bytes, int then) : to_(port), then_(then), left_(bytes) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    accepts_ = std::thread([this] { Accept(); });
  }
  ~CuttingProxy() {
    shutdown(listener_, SHUT_RDWR);
    accepts_.join();
    for (const int one : sockets_) shutdown(one, SHUT_RDWR);
    for (std::thread& pump : pumps_) pump.join();
    for (const int one : sockets_) close(one);
    close(listener_);
  }
  int port() const { return port_; }
  bool cut() const { return left_ <= 0; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  void Accept() {
    for (int client; (client = accept(listener_, nullptr, nullptr)) >= 0;) {
      const int server = socket(AF_INET, SOCK_STREAM, 0);
      const bool first = sockets_.empty();
      const sockaddr_in address = Loopback(first ? to_ : then_);
      connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      sockets_.insert(sockets_.end(), {client, server});
      pumps_.emplace_back([this, client, server, first] { Pump(client, server, first); });
      pumps_.emplace_back([this, client, server] { Pump(server, client, false); });
    }
  }
  void Pump(int from, int to, bool counted) {
    char bytes[512];
    for (ssize_t n; (n = recv(from, bytes, sizeof(bytes), 0)) > 0;) {
      if (counted && (left_ -= n) <= 0) break;
      if (send(to, bytes, static_cast<size_t>(n), MSG_NOSIGNAL) != n) break;
    }
    shutdown(from, SHUT_RDWR);
    shutdown(to, SHUT_RDWR);
  }

  const int to_, then_;
  std::atomic<int64_t> left_;
  int listener_ = -1, port_ = 0;
  std::vector<int> sockets_;
  std::vector<std::thread> pumps_;
  std::thread accepts_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_HAND_OVER_CUTTING_PROXY_H_
