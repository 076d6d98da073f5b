// Commands of an operator, who may act on all tenants: drain, quotas, set-quota, evict-sequences
// and evict-model. All of them but quotas change the server's state.
#ifndef MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
#define MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_

#include <string>
#include <vector>

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddOperatorCommands(Program* program);

// Returns the servers of `list` (HOST:PORT, separated by commas) in the order in which a drain
// names them. `own` is the name of this host, without a domain. The order starts after the server
// of the list whose host is `own` or begins with `own` and a dot, wraps around at the end and
// leaves that server out. So servers that drain at the same time begin with different peers where
// they have as much room, and where a long list is cut. If no server is `own`, returns the list as
// it is.
std::vector<std::string> PeersOf(const std::string& list, const std::string& own);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
