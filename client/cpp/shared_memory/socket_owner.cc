#include "client/cpp/shared_memory/socket_owner.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace mla::client {
namespace {

bool IsOpenToAll(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder =
      slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  struct stat found {};
  return stat(folder.c_str(), &found) == 0 && (found.st_mode & S_IWOTH) != 0;
}

absl::Status Refused(const std::string& path, int64_t uid) {
  return absl::PermissionDeniedError(
      absl::StrCat("unix:", path, ": belongs to user ", uid,
                   " and lies in a folder that every user may write to; if that is the server's "
                   "user, name it as server_uid"));
}

}  // namespace

TrustedUsers TrustedUsersWith(int64_t server_uid) { return {geteuid(), server_uid}; }

absl::Status CheckSocketFile(const std::string& path, const TrustedUsers& users) {
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0 || users.Include(about.st_uid) || !IsOpenToAll(path)) {
    return absl::OkStatus();
  }
  return Refused(path, about.st_uid);
}

absl::Status CheckSocketPeer(int socket, const std::string& path, const TrustedUsers& users) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::UnavailableError(absl::StrCat("unix:", path, ": no peer"));
  }
  if (users.Include(peer.uid) || !IsOpenToAll(path)) return absl::OkStatus();
  return Refused(path, peer.uid);
}

}  // namespace mla::client
