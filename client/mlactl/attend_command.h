// `mlactl attend` lets the server compute a few rows of attention and checks them against this
// program's own results.
#ifndef MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_
#define MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// Its exit code is kDifferent when an output is outside the rule of output_comparison.h. The
// command removes all objects it created on the server, whether it succeeds or fails.
void AddAttendCommand(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_
