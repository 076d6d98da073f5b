// Commands that change the server's state: drains, quotas, evictions.
#ifndef MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
#define MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_

#include <string>
#include <vector>

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddOperatorCommands(Program* program);

// Returns the servers of `list` (HOST:PORT, separated by commas) in the order in which they are
// asked. The order starts after the server whose host begins with the label `own`, wraps around at
// the end of the list and leaves that server out.
std::vector<std::string> PeersOf(const std::string& list, const std::string& own);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
