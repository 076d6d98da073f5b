#include "server/process/socket_files.h"

#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::server {

namespace {

std::string OwnFolder() { return absl::StrCat("/tmp/mla-server-", geteuid()); }

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
}

}  // namespace

absl::StatusOr<gid_t> FindGroup(const std::string& name) {
  if (uint32_t number = 0; absl::SimpleAtoi(name, &number)) return number;
  std::vector<char> buffer(65536);
  group entry{};
  group* found = nullptr;
  getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found != nullptr) return found->gr_gid;
  return absl::InvalidArgumentError(
      absl::StrCat("server.socket_group: got \"", name, "\", must be a group of this host"));
}

absl::Status GiveToGroup(const std::string& path, const std::string& group) {
  MLA_ASSIGN_OR_RETURN(const auto id, FindGroup(group));
  if (chown(path.c_str(), static_cast<uid_t>(-1), id) == 0 && chmod(path.c_str(), 0660) == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("server.socket_group: ", path, " cannot be given to ", group, ": ",
                   std::strerror(errno), "; the server must be a member of the group"));
}

std::string RuntimeFolder() {
  const char* const given = std::getenv("XDG_RUNTIME_DIR");
  return given != nullptr && *given != '\0' ? given : OwnFolder();
}

absl::Status CheckSocketPath(const std::string& key, const std::string& path, bool open_folder,
                             uid_t uid) {
  const auto bad = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, ": ", what));
  };
  const std::string folder = FolderOf(path);
  struct stat about {};
  if (folder == OwnFolder()) {
    // The folder lies where others may write, so its content may be theirs, a link for example.
    if (lstat(folder.c_str(), &about) != 0 && errno == ENOENT) return absl::OkStatus();
    if (!S_ISDIR(about.st_mode) || about.st_uid != uid ||
        (about.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      return bad(absl::StrCat(folder, " must be a folder that only user ", uid, " may write to"));
    }
  }
  if (stat(folder.c_str(), &about) != 0) {
    return bad(absl::StrCat("its folder ", folder, ": ", std::strerror(errno)));
  }
  if (!S_ISDIR(about.st_mode)) return bad(absl::StrCat(folder, " is not a folder"));
  struct stat place {};
  const bool exists = lstat(path.c_str(), &place) == 0;
  if (exists && !S_ISSOCK(place.st_mode)) {
    return bad(S_ISDIR(place.st_mode) ? "is a folder" : "is a file and not a socket");
  }
  if ((about.st_mode & S_IWOTH) != 0 && !open_folder) {
    return bad(absl::StrCat("every user may write to its folder ", folder,
                            " and so put another socket in its place; use a folder of the server's "
                            "own, or server.open_folder"));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return bad(absl::StrCat("its folder ", folder, ": ", std::strerror(errno)));
  }
  if (!exists) return absl::OkStatus();
  if (place.st_uid != uid) return bad(absl::StrCat("is a socket of user ", place.st_uid));
  return absl::OkStatus();
}

absl::Status PrepareSocketFolder(const std::string& key, const std::string& path,
                                 bool open_folder) {
  if (FolderOf(path) == OwnFolder()) mkdir(OwnFolder().c_str(), S_IRWXU);  // or it is there
  return CheckSocketPath(key, path, open_folder, geteuid());
}

bool IsServed(const std::string& path, int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

}  // namespace mla::server
