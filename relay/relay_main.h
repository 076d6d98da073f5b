// A relay as a process: what the program mla-server does with `ucx-relay` as its first argument.
//
// A process of its own, because UCX is not written for hostile peers: a packet can end the process
// or write to its memory (docs/rdma.md). Call it before the program does anything else.
#ifndef MLA_RELAY_RELAY_MAIN_H_
#define MLA_RELAY_RELAY_MAIN_H_

namespace mla::relay {

// Serves the server at the other end of kRelayControl (relay_channel.h) until it closes that
// socket. Returns the process's exit code.
int RunRelay();

}  // namespace mla::relay

#endif  // MLA_RELAY_RELAY_MAIN_H_
