#include "tests/integration/rpc/clients/forgetful_relay.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace mla::integration {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

constexpr int kLookMs = 10;  // how often the thread looks at the orders of the test

}  // namespace

ForgetfulRelay::ForgetfulRelay(int server_port)
    : server_port_(server_port), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener_, 8), 0);
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Run(); });
}

ForgetfulRelay::~ForgetfulRelay() {
  stop_ = true;
  thread_.join();
  close(listener_);
}

std::string ForgetfulRelay::target() const { return absl::StrCat("127.0.0.1:", port_); }

void ForgetfulRelay::Forget() {
  forget_ = true;
  while (forget_) std::this_thread::yield();
}

void ForgetfulRelay::Refuse(int attempts) {
  refusals_left_ = attempts;
  end_ = true;
  while (end_) std::this_thread::yield();
}

bool ForgetfulRelay::Carry(int from, int to, bool known) {
  char buffer[65536];
  const ssize_t got = recv(from, buffer, sizeof(buffer), 0);
  if (got <= 0) return false;
  for (ssize_t sent = 0; known && sent < got;) {
    const ssize_t more = send(to, buffer + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
    if (more <= 0) return false;
    sent += more;
  }
  return true;
}

void ForgetfulRelay::Run() {
  while (!stop_) {
    if (forget_) {
      for (Link& link : links_) link.known = false;
      forget_ = false;
    }
    if (end_) {
      for (const Link& link : links_) {
        close(link.client);
        close(link.server);
      }
      links_.clear();
      end_ = false;
    }
    std::vector<pollfd> ends = {{listener_, POLLIN, 0}};
    for (const Link& link : links_) {
      ends.push_back({link.client, POLLIN, 0});
      ends.push_back({link.server, POLLIN, 0});
    }
    poll(ends.data(), ends.size(), kLookMs);
    for (size_t i = links_.size(); i-- > 0;) {
      const Link link = links_[i];
      bool goes_on = true;
      if (ends[2 * i + 1].revents != 0) goes_on = Carry(link.client, link.server, link.known);
      if (goes_on && ends[2 * i + 2].revents != 0) {
        goes_on = Carry(link.server, link.client, link.known);
      }
      if (goes_on) continue;
      close(link.client);
      close(link.server);
      links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (ends[0].revents != 0) {
      const int client = accept(listener_, nullptr, nullptr);
      if (refusals_left_ > 0) {
        close(client);
        --refusals_left_;
        continue;
      }
      const int server = socket(AF_INET, SOCK_STREAM, 0);
      const sockaddr_in address = Loopback(server_port_);
      EXPECT_EQ(connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
      links_.push_back({client, server});
    }
  }
  for (const Link& link : links_) {
    close(link.client);
    close(link.server);
  }
}

}  // namespace mla::integration
