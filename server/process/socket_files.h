// Files of unix sockets: where they may lie, and who may connect to them.
//
// Threading: any thread.
#ifndef MLA_SERVER_PROCESS_SOCKET_FILES_H_
#define MLA_SERVER_PROCESS_SOCKET_FILES_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::server {

// Returns the group of this name, or of this number. INVALID_ARGUMENT naming server.socket_group if
// the group does not exist.
absl::StatusOr<gid_t> FindGroup(const std::string& name);

// Lets only the owner and the members of `group` connect to the socket at `path`.
// FAILED_PRECONDITION if this process may not give files to the group; it must be a member.
absl::Status GiveToGroup(const std::string& path, const std::string& group);

// Returns the folder of sockets whose path is "auto": $XDG_RUNTIME_DIR if set, else
// /tmp/mla-server-UID, which PrepareSocketFolder makes.
std::string RuntimeFolder();

// Returns OK if a server of user `uid` can make a socket at `path` that stays its own; otherwise
// INVALID_ARGUMENT naming `key`. The folder must exist, unless it is RuntimeFolder. The path must
// be free or have a socket of the user. Unless `open_folder`, the folder must not be writable for
// every user, because others could then replace the socket.
absl::Status CheckSocketPath(const std::string& key, const std::string& path, bool open_folder,
                             uid_t uid);

// Does what CheckSocketPath does, for this process's user, after making RuntimeFolder's folder in
// /tmp if `path` lies there. Call it before the socket is made.
absl::Status PrepareSocketFolder(const std::string& key, const std::string& path, bool open_folder);

// Returns true if a server accepts connections at the socket `path` of type SOCK_STREAM or
// SOCK_SEQPACKET, so that its file must not be replaced. Returns false for a path that is too long
// for a socket.
bool IsServed(const std::string& path, int type);

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_SOCKET_FILES_H_
