// mlactl export and import: rows of sequences to files and back.
#ifndef MLA_CLIENT_MLACTL_PAGE_COMMANDS_H_
#define MLA_CLIENT_MLACTL_PAGE_COMMANDS_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

void AddPageCommands(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_PAGE_COMMANDS_H_
