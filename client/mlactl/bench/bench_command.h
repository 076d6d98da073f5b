// `mlactl bench`: load on a server, measured.
#ifndef MLA_CLIENT_MLACTL_BENCH_BENCH_COMMAND_H_
#define MLA_CLIENT_MLACTL_BENCH_BENCH_COMMAND_H_

#include "client/mlactl/cli/command_line.h"

namespace mla::mlactl {

// Runs everything that the options ask for and prints the report. What it created on the server is
// gone when it returns, however it returns.
int Bench(const Arguments& arguments);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_BENCH_BENCH_COMMAND_H_
