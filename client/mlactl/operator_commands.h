// Commands that change the server's state: drains, quotas, evictions.
#ifndef MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
#define MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddOperatorCommands(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_OPERATOR_COMMANDS_H_
