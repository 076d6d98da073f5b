// Checks that a unix socket is the server's: in a folder that every user may write to, such as
// /tmp, any user can put a socket where a client looks for the server's.
//
// Pure functions of the file system; any thread.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_SOCKET_OWNER_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_SOCKET_OWNER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace mla::client {

// The users whose sockets are trusted in any folder: root, `own_uid`, and `server_uid` unless it is
// -1.
struct TrustedUsers {
  int64_t own_uid = 0;
  int64_t server_uid = -1;

  bool Include(int64_t uid) const { return uid == 0 || uid == own_uid || uid == server_uid; }
};

// Returns this process's user, and `server_uid` unless it is -1.
TrustedUsers TrustedUsersWith(int64_t server_uid);

// PERMISSION_DENIED if the socket file at `path` belongs to another user and lies in a folder that
// every user may write to. OK without a file: connecting will then fail.
absl::Status CheckSocketFile(const std::string& path, const TrustedUsers& users);

// Checks in the same way the process at the other end of a connected socket, which the kernel
// names.
absl::Status CheckSocketPeer(int socket, const std::string& path, const TrustedUsers& users);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_SOCKET_OWNER_H_
