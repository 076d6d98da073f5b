#include "server/socket_files.h"

#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace mla::server {

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
  const auto id = FindGroup(group);
  if (!id.ok()) return id.status();
  if (chown(path.c_str(), static_cast<uid_t>(-1), *id) == 0 && chmod(path.c_str(), 0660) == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("server.socket_group: ", path, " cannot be given to ", group, ": ",
                   std::strerror(errno), "; the server must be a member of the group"));
}

absl::Status CheckSocketPath(const std::string& key, const std::string& path) {
  const auto bad = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, ": ", what));
  };
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? std::string(".")
                             : slash == 0               ? std::string("/")
                                                        : path.substr(0, slash);
  struct stat found {};
  if (stat(folder.c_str(), &found) != 0) {
    return bad(absl::StrCat("its folder ", folder, ": ", std::strerror(errno)));
  }
  if (!S_ISDIR(found.st_mode)) return bad(absl::StrCat(folder, " is no folder"));
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return bad(absl::StrCat("its folder ", folder, ": ", std::strerror(errno)));
  }
  if (lstat(path.c_str(), &found) == 0 && !S_ISSOCK(found.st_mode)) {
    return bad(S_ISDIR(found.st_mode) ? "is a folder" : "is a file that is no socket");
  }
  return absl::OkStatus();
}

}  // namespace mla::server
