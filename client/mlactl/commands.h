// The table of commands, and the program around it.
#ifndef MLA_CLIENT_MLACTL_COMMANDS_H_
#define MLA_CLIENT_MLACTL_COMMANDS_H_

#include <span>

#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

std::span<const Command> Commands();

// Does what the words say and returns the exit code. `words` without the program's name.
int RunMlactl(std::span<const char* const> words);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_COMMANDS_H_
