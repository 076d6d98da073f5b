// `mlactl attend`: a few rows of attention by the server, checked against this program's own.
#ifndef MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_
#define MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_

#include <vector>

#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

std::vector<Option> AttendOptionTable();

// kDifferent when an output is outside the rule of output_comparison.h. What it created on the
// server is gone when it returns.
int Attend(const Arguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_ATTEND_COMMAND_H_
