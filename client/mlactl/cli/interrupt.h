// Handles Ctrl-C and SIGTERM. They end a command that has created nothing on the server. In a
// command that must clean up they set a flag.
#ifndef MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
#define MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_

#include <atomic>

namespace mla::mlactl {

// From this call on, SIGINT and SIGTERM end the process at once with kInterrupted.
void ExitOnInterrupts();

// From this call on, the first SIGINT or SIGTERM sets the returned flag, and the second one ends
// the process with the default action.
const std::atomic<bool>& CatchInterrupts();

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
