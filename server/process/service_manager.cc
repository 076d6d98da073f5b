#include "server/process/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"

namespace mla::server {

bool NotifyManager(const std::string& text) {
  const char* const path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return false;
  sockaddr_un address{};
  const size_t length = std::strlen(path);
  if (length < 2 || length >= sizeof(address.sun_path)) return false;
  if (path[0] != '/' && path[0] != '@') return false;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // a name without a file
  const int handle = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (handle < 0) return false;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  const ssize_t sent = sendto(handle, text.data(), text.size(), MSG_NOSIGNAL,
                              reinterpret_cast<const sockaddr*>(&address), size);
  close(handle);
  return sent == static_cast<ssize_t>(text.size());
}

std::string ReloadingText() {
  constexpr int64_t kMicrosPerSecond = 1'000'000;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t micros = now.tv_sec * kMicrosPerSecond + now.tv_nsec / kNanosPerMicro;
  return "RELOADING=1\nMONOTONIC_USEC=" + std::to_string(micros);
}

}  // namespace mla::server
