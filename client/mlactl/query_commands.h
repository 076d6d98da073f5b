// Adds the commands that read the state of a server: info, status, watch, models, sequences,
// health.
#ifndef MLA_CLIENT_MLACTL_QUERY_COMMANDS_H_
#define MLA_CLIENT_MLACTL_QUERY_COMMANDS_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddQueryCommands(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_QUERY_COMMANDS_H_
