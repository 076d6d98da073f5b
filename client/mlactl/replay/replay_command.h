// Adds `mlactl replay FILE`, which sends a recording to a server and compares the outputs with the
// recorded ones.
#ifndef MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_
#define MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// Its exit code is kDifferent when outputs are outside the rule. The command removes all objects it
// created on the server, whether it succeeds or fails.
void AddReplayCommand(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_
