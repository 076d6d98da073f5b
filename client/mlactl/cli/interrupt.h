// What Ctrl-C and SIGTERM do: end a command that has nothing to give back, and set a flag in one
// that has.
#ifndef MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
#define MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_

#include <atomic>

namespace mla::mlactl {

// From now on SIGINT and SIGTERM end the process at once, with kInterrupted.
void ExitOnInterrupts();

// From the first call on, the first SIGINT or SIGTERM sets the flag; a second one ends the process
// as it always did.
const std::atomic<bool>& CatchInterrupts();

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_INTERRUPT_H_
