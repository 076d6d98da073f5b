// Ctrl-C and SIGTERM as a flag, so that what was begun can be given back.
#ifndef MLA_CLIENT_MLACTL_INTERRUPT_H_
#define MLA_CLIENT_MLACTL_INTERRUPT_H_

#include <atomic>

namespace mla::mlactl {

// From the first call on, the first SIGINT or SIGTERM sets the flag; a second one ends the process
// as it always did.
const std::atomic<bool>& CatchInterrupts();

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_INTERRUPT_H_
