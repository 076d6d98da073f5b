// Adds all commands of mlactl to the program.
#ifndef MLA_CLIENT_MLACTL_COMMANDS_H_
#define MLA_CLIENT_MLACTL_COMMANDS_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// `program` must outlive its run: the completion command reads it.
void AddCommands(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_COMMANDS_H_
