#include "server/connections/connection_acceptor.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "server/logging/logging.h"
#include "server/process/process_usage.h"

namespace mla::server {
namespace {

constexpr int kAcceptedAtOnce = 16;
// The acceptor pauses for this time if the kernel lacks a descriptor or memory for a connection.
constexpr int kPauseMillis = 100;
// At least this time passes between two checks of all connections.
constexpr int64_t kForgetNanos = 20'000'000;
constexpr int64_t kRefusedLogNanos = 10'000'000'000;  // between two lines about refusals
// TCP_RTO_MAX_MS of Linux 6.15 and later: the longest pause after which packets that are not
// acknowledged are sent again. Without it pauses double, so an answer that an outage has swallowed
// comes up to as long after its end as it lasted.
constexpr int kLongestPauseOption = 44;
constexpr int kLongestPauseMs = 1000;

void Enable(int socket, int level, int option, int value = 1) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

// Returns 0 if `descriptor` is not a socket.
uint64_t CookieOf(int descriptor) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(descriptor, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

// Returns the address without its port, or the user at the other end of a unix socket.
std::string PeerOf(int descriptor, const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return std::string(reinterpret_cast<const char*>(&v4.sin_addr), sizeof(v4.sin_addr));
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    return std::string(reinterpret_cast<const char*>(&v6.sin6_addr), sizeof(v6.sin6_addr));
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return absl::StrCat("user ", peer.uid);
}

int PortOf(int descriptor) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void SetPort(sockaddr* address, int port) {
  auto& field = address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(address)->sin_port;
  field = htons(static_cast<uint16_t>(port));
}

// Makes a listening socket; returns -1 and sets errno on failure.
int BindTo(const sockaddr* address, socklen_t size) {
  const int descriptor = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return -1;
  if (address->sa_family != AF_UNIX) Enable(descriptor, SOL_SOCKET, SO_REUSEADDR);
  if (address->sa_family == AF_INET6) Enable(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(descriptor, address, size) == 0 && listen(descriptor, SOMAXCONN) == 0) {
    return descriptor;
  }
  const int why = errno;
  close(descriptor);
  errno = why;
  return -1;
}

}  // namespace

absl::StatusOr<int> ConnectionAcceptor::ListenTcp(const std::string& address, Handler handler) {
  const auto failed = [&address](const char* why) {
    return absl::UnavailableError(absl::StrCat("server.listen: ", address, ": ", why));
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return failed("must be host:port");
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* addresses = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                address.substr(colon + 1).c_str(), &hints, &addresses);
  if (error != 0) return failed(gai_strerror(error));
  const absl::Cleanup free_found = [addresses] { freeaddrinfo(addresses); };
  int port = 0, why = 0;
  for (const addrinfo* one = addresses; one != nullptr; one = one->ai_next) {
    // The port that the system chose for the first address is used for all.
    if (port != 0) SetPort(one->ai_addr, port);
    const int descriptor = BindTo(one->ai_addr, one->ai_addrlen);
    if (descriptor < 0) {
      why = errno;
      if (why == EADDRINUSE) return failed(std::strerror(why));
      continue;  // the host does not have this address family
    }
    port = PortOf(descriptor);
    listeners_.push_back({descriptor, handler.get(), true});
  }
  if (port == 0) return failed(std::strerror(why));
  handlers_.push_back(std::move(handler));
  return port;
}

absl::Status ConnectionAcceptor::ListenUnix(const std::string& path, Handler handler) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(absl::StrCat("unix:", path, ": the path is too long"));
  }
  path.copy(address.sun_path, path.size());
  struct stat there {};
  if (lstat(path.c_str(), &there) == 0 && S_ISSOCK(there.st_mode)) unlink(path.c_str());
  const int descriptor = BindTo(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (descriptor < 0) {
    return absl::UnavailableError(absl::StrCat("unix:", path, ": ", std::strerror(errno)));
  }
  listeners_.push_back({descriptor, handler.get(), false});
  handlers_.push_back(std::move(handler));
  unix_path_ = path;
  return absl::OkStatus();
}

absl::Status ConnectionAcceptor::Start() {
  events_ = epoll_create1(EPOLL_CLOEXEC);
  stop_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = listeners_.size();
  bool added = epoll_ctl(events_, EPOLL_CTL_ADD, stop_event_, &event) == 0;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    event.data.u64 = i;
    added = added && epoll_ctl(events_, EPOLL_CTL_ADD, listeners_[i].descriptor, &event) == 0;
  }
  if (!added) return absl::UnavailableError(absl::StrCat("epoll: ", std::strerror(errno)));
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void ConnectionAcceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(stop_event_, &one, sizeof(one)) == sizeof(one)) thread_.join();
  }
  if (!unix_path_.empty()) unlink(std::exchange(unix_path_, "").c_str());
  for (const Listener& listener : listeners_) close(listener.descriptor);
  listeners_.clear();
  for (int* const one : {&events_, &stop_event_}) {
    if (*one >= 0) close(std::exchange(*one, -1));
  }
}

void ConnectionAcceptor::Run() {
  for (;;) {
    epoll_event events[8];
    const int count = epoll_wait(events_, events, 8, paused_ ? kPauseMillis : -1);
    if (paused_) Watch(true);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == listeners_.size()) return;
      Accept(listeners_[events[i].data.u64]);
    }
  }
}

void ConnectionAcceptor::Watch(bool watch) {
  paused_ = !watch;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{};
    if (watch) event.events = EPOLLIN;
    event.data.u64 = i;
    epoll_ctl(events_, EPOLL_CTL_MOD, listeners_[i].descriptor, &event);
  }
}

void ConnectionAcceptor::Accept(const Listener& listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    const int descriptor = accept4(listener.descriptor, reinterpret_cast<sockaddr*>(&address),
                                   &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        Refuse("descriptors");
        Watch(false);  // the connection stays in the queue and would be reported at once again
      }
      return;
    }
    Connection connection{descriptor, CookieOf(descriptor), PeerOf(descriptor, address)};
    const bool reserved = InDescriptorReserve(descriptor);
    if (reserved || !HasRoom(connection.peer)) {
      Refuse(reserved ? "descriptors" : "connections");
      close(descriptor);
      continue;
    }
    if (listener.tcp) {
      Enable(descriptor, IPPROTO_TCP, TCP_NODELAY);
      Enable(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
             static_cast<int>(std::min<int64_t>(bounds_.unacknowledged_ms, INT32_MAX)));
      Enable(descriptor, IPPROTO_TCP, kLongestPauseOption, kLongestPauseMs);  // older ones refuse
    }
    ++of_peer_[connection.peer];
    connections_.push_back(std::move(connection));
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters handed;
    handed.listener_fd = listener.descriptor;
    handed.fd = descriptor;
    listener.handler->HandleNewConnection(&handed);
  }
}

bool ConnectionAcceptor::HasRoom(const std::string& peer) {
  const auto full = [&] {
    const auto found = of_peer_.find(peer);
    return connections_.size() >= static_cast<size_t>(bounds_.max_connections) ||
           (found != of_peer_.end() && found->second >= bounds_.peer_connections);
  };
  if (!full()) return true;
  // In a flood of connections, checking all of them each time would cost too much.
  if (SteadyNanos() - forgot_ns_ < kForgetNanos) return false;
  ForgetClosed();
  return !full();
}

void ConnectionAcceptor::ForgetClosed() {
  forgot_ns_ = SteadyNanos();
  std::erase_if(connections_, [this](const Connection& connection) {
    if (CookieOf(connection.descriptor) == connection.cookie) return false;
    const auto of_peer = of_peer_.find(connection.peer);
    if (--of_peer->second == 0) of_peer_.erase(of_peer);
    return true;
  });
}

void ConnectionAcceptor::Refuse(const char* bound) {
  if (bounds_.on_refused) bounds_.on_refused();
  ++refused_unlogged_;
  const int64_t now = SteadyNanos();
  if (refused_logged_ns_ != 0 && now - refused_logged_ns_ < kRefusedLogNanos) return;
  refused_logged_ns_ = now;
  Log(LogLevel::kWarning, "connections_refused",
      {{"bound", bound}, {"connections", std::exchange(refused_unlogged_, 0)}});
}

}  // namespace mla::server
