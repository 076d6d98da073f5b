// Finds the server that is meant, and the way to reach it, if the command line does not name them.
//
// Contexts are servers by name, in a file of the user's: $MLA_CLIENT_CONTEXTS, else
// $XDG_CONFIG_HOME/mlactl/contexts.json, else ~/.config/mlactl/contexts.json. They hold paths of
// keys, never keys. Threading: one thread.
#ifndef MLA_CLIENT_MLACTL_CONTEXT_CONTEXT_H_
#define MLA_CLIENT_MLACTL_CONTEXT_CONTEXT_H_

#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::mlactl {

struct Connection {
  std::string target, tenant, tls_ca, tls_cert, tls_key, tls_server_name;
};

struct Contexts {
  std::string current;  // empty: none
  std::map<std::string, Connection> all;
};

// Returns the value of a variable of the environment, or null if it is not set.
using Environment = std::function<const char*(const char* name)>;

// Returns the path of the user's file; empty if the user has no home.
std::string ContextsPath(const Environment& environment);
// Reads the contexts of the file; none if it does not exist. INVALID_ARGUMENT if it is not such a
// file, or larger than a megabyte.
absl::StatusOr<Contexts> ReadContexts(const std::string& path);
// Replaces the file as a whole, and makes its folder if there is none. Only the user may read them.
absl::Status WriteContexts(const std::string& path, const Contexts& contexts);

// Returns `given`, which the command line says, completed from two sources in this order:
// MLA_TARGET, MLA_CLIENT_TENANT, _CA, _CERT, _KEY and _SERVER_NAME; then a context. The context is
// `name`, or MLA_CLIENT_CONTEXT, or the current one, which counts only if no target is given.
// NOT_FOUND: there is no such context.
absl::StatusOr<Connection> Complete(const Connection& given, const std::string& name,
                                    const Environment& environment);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CONTEXT_CONTEXT_H_
