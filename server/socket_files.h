// Files of unix sockets: who may connect to them.
//
// Threading: any thread.
#ifndef MLA_SERVER_SOCKET_FILES_H_
#define MLA_SERVER_SOCKET_FILES_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::server {

// The group of this name, or of this number. INVALID_ARGUMENT naming server.socket_group if there
// is none.
absl::StatusOr<gid_t> FindGroup(const std::string& name);

// Lets the owner and the members of `group` connect to the socket at `path`, and nobody else.
// FAILED_PRECONDITION when this process may not give its files to the group: it must be a member.
absl::Status GiveToGroup(const std::string& path, const std::string& group);

// OK if a server can make a socket at `path`: its folder exists and nothing but a socket is there.
// Else INVALID_ARGUMENT naming `key`.
absl::Status CheckSocketPath(const std::string& key, const std::string& path);

}  // namespace mla::server

#endif  // MLA_SERVER_SOCKET_FILES_H_
