// Adds `mlactl hint`, which sends hints about cached rows.
#ifndef MLA_CLIENT_MLACTL_HINTS_HINT_COMMAND_H_
#define MLA_CLIENT_MLACTL_HINTS_HINT_COMMAND_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddHintCommand(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_HINTS_HINT_COMMAND_H_
