// Ctrl-C and SIGTERM: they end a command that has created nothing on the server, and set a flag in
// one that has to clean up.
#ifndef MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
#define MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_

#include <atomic>

namespace mla::mlactl {

// From now on SIGINT and SIGTERM end the process at once, with kInterrupted.
void ExitOnInterrupts();

// After the first call, one SIGINT or SIGTERM sets the returned flag; a second one ends the process
// with the default action.
const std::atomic<bool>& CatchInterrupts();

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
