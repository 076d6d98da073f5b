// `mlactl replay FILE`: a recording sent to a server, its outputs compared with the recorded ones.
#ifndef MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_
#define MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_

#include <vector>

#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

std::vector<Option> ReplayOptionTable();

// kDifferent when outputs are outside the rule. What it created on the server is gone when it
// returns.
int Replay(const Arguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_REPLAY_REPLAY_COMMAND_H_
