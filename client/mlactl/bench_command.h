// `mlactl bench` puts load on a server and measures it.
#ifndef MLA_CLIENT_MLACTL_BENCH_COMMAND_H_
#define MLA_CLIENT_MLACTL_BENCH_COMMAND_H_

#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// The command removes all objects it created on the server, whether it succeeds or fails.
void AddBenchCommand(Program* program);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_COMMAND_H_
