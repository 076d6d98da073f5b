#include "tests/bench/wire/bare_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "tests/bench/wire/parallel_touch.h"

namespace mla::bench {
namespace {

// Bytes of the inputs that follow, and of the outputs that are wanted.
using Header = std::array<uint64_t, 2>;

bool Send(int socket, const void* data, size_t bytes, int flags = 0) {
  for (size_t sent = 0; sent < bytes;) {
    const ssize_t count =
        send(socket, static_cast<const char*>(data) + sent, bytes - sent, flags | MSG_NOSIGNAL);
    if (count <= 0) return false;
    sent += static_cast<size_t>(count);
  }
  return true;
}

bool Receive(int socket, void* data, size_t bytes) {
  return bytes == 0 || recv(socket, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

void SendAtOnce(int socket) {
  const int yes = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

}  // namespace

void ServeBareTcp(Shared* shared) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 4) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    Die("cannot listen over TCP");
  }
  ParallelTouch team(shared->touch_threads, &shared->touch);
  uint64_t sum = 0;
  std::vector<std::byte> in, out;
  shared->bare_port = ntohs(address.sin_port);
  for (;;) {
    const int connection = accept(listener, nullptr, nullptr);
    SendAtOnce(connection);
    Header header;
    while (Receive(connection, &header, sizeof(header))) {
      in.resize(header[0]);
      out.resize(header[1]);
      if (!Receive(connection, in.data(), in.size())) break;
      if (shared->touch.load() != 0) {
        sum += team.Sum(in.data(), in.size());
        team.Fill(out.data(), out.size(), static_cast<int>(sum & 1));
      }
      if (!Send(connection, out.data(), out.size())) break;
    }
    close(connection);
  }
}

BareTcp::BareTcp(const Shared& shared, const Shape& shape)
    : in_memory_(shape.in()), out_memory_(shape.o()) {
  in = in_memory_;
  out = out_memory_;
  socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(shared.bare_port.load());
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    Die("cannot connect over TCP");
  }
  SendAtOnce(socket_);
}

BareTcp::~BareTcp() { close(socket_); }

void BareTcp::Attend(uint64_t, uint32_t) {
  const Header header{in.size(), out.size()};
  if (!Send(socket_, &header, sizeof(header), MSG_MORE) || !Send(socket_, in.data(), in.size()) ||
      !Receive(socket_, out.data(), out.size())) {
    Die("the bare TCP connection has ended");
  }
}

}  // namespace mla::bench
