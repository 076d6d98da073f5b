// The part of SharedMemoryListener for connections that other parts of the server introduce.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "server/logging/logging.h"
#include "server/process/process_usage.h"
#include "server/shared_memory/shared_memory_listener.h"

namespace mla::server {
namespace {

absl::Status NoDescriptor(int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no descriptor for a ring: ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<int> SharedMemoryListener::ConnectFor(const std::string& tenant) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return NoDescriptor(errno);
  if (InDescriptorReserve(std::max(pair[0], pair[1]))) {
    for (const int descriptor : pair) close(descriptor);
    return NoDescriptor(EMFILE);
  }
  const MutexLock lock(introduced_mutex_);
  introduced_.push_back({pair[0], tenant});
  const uint64_t one = 1;
  if (write(introduced_event_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    return absl::InternalError(absl::StrCat("a ring's connection: ", std::strerror(errno)));
  }
  return pair[1];
}

void SharedMemoryListener::TakeIntroduced() {
  uint64_t count = 0;
  if (read(introduced_event_, &count, sizeof(count)) < 0) return;
  std::vector<Introduced> introduced;
  {
    const MutexLock lock(introduced_mutex_);
    introduced.swap(introduced_);
  }
  for (const Introduced& one : introduced) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = one.descriptor;
    if (epoll_ctl(events_, EPOLL_CTL_ADD, one.descriptor, &event) != 0) {
      close(one.descriptor);
      continue;
    }
    Connection& connection = connections_[one.descriptor];
    connection.descriptor = one.descriptor;
    connection.user = geteuid();
    connection.since_ns = SteadyNanos();
    connection.tenant = one.tenant;
    connection.introduced = true;
    Handshake(&connection);
  }
}

}  // namespace mla::server
