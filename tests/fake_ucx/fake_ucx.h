// UCX's entry points without UCX: workers of one process that exchange active messages, with faults
// on demand. Payloads above kEagerBytes stay with the sender until the receiver asks for them, as
// in UCX's rendezvous.
//
// State is the process's: one test at a time. Threading: any thread; one lock, which is not held
// while callbacks run.
#ifndef MLA_TESTS_FAKE_UCX_FAKE_UCX_H_
#define MLA_TESTS_FAKE_UCX_FAKE_UCX_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/wire/ucx/ucx_api.h"

namespace mla::fake_ucx {

inline constexpr size_t kEagerBytes = 1024;

struct Faults {
  // Deliver messages and payloads in an order that this seed makes; 0: as they were sent.
  uint64_t reorder = 0;
  // Name of the call that fails: "init", "worker", "connection", "memory", "send", "receive".
  std::string fails = {};
  // Number of messages until the peer is lost to both sides; -1: it never is.
  int64_t lost_after = -1;
  // Messages are kept back.
  bool stalled = false;
  // Workers have no descriptor to sleep on.
  bool no_descriptor = false;
};

// Forgets all workers and sets the faults.
void Reset(const Faults& faults = {});
Faults& faults();  // may be changed while no other thread uses the fake

wire::UcxApi Api();

// Counts since Reset.
struct Counts {
  uint64_t messages = 0, payload_bytes = 0, live_requests = 0, registered = 0;
};
Counts counts();

}  // namespace mla::fake_ucx

#endif  // MLA_TESTS_FAKE_UCX_FAKE_UCX_H_
