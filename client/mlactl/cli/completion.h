// Writes scripts that complete a program's commands, options and choices in a shell.
#ifndef MLA_CLIENT_MLACTL_CLI_COMPLETION_H_
#define MLA_CLIENT_MLACTL_CLI_COMPLETION_H_

#include <string>

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// Returns the script for `shell`: "bash", "zsh" or "fish". Empty for any other shell.
std::string CompletionScript(const std::string& shell, const Program& program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_COMPLETION_H_
