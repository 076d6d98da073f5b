// UCX's entry points without UCX: workers of one process that exchange active messages, with faults
// on demand. Payloads above kEagerBytes stay with the sender until the receiver asks for them, as
// in UCX's rendezvous. Puts are done while the sender makes progress, in any order, if their key is
// that of memory which holds them and may be written; a flush is done after the puts before it.
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
  // Name of the call that fails: "init", "worker", "connection", "memory", "send", "receive",
  // "key", "take_key", "put", "flush".
  std::string fails = {};
  // Number of messages until the peer is lost to both sides; -1: it never is.
  int64_t lost_after = -1;
  // Messages are kept back.
  bool stalled = false;
  bool flips = false;  // as of SetFlips
  // Most bytes of a message's header.
  size_t most_header_bytes = 8192;
  // Kinds of memory that are known, by UCS_BIT of their types.
  uint64_t memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST);
  // Workers have no descriptor to sleep on.
  bool no_descriptor = false;
};

// Forgets all workers and sets the faults.
void Reset(const Faults& faults = {});
Faults& faults();  // may be changed while no other thread uses the fake
// Keeps all messages and puts back, or lets them go on; call `name` fails from now on. At any time.
void SetStalled(bool stalled);
void SetFails(const std::string& name);
// Payloads arrive with a bit changed.
void SetFlips(bool flips);

// The worker with this address stops as by SIGSTOP when it comes to this point for the next time:
// its calls do nothing from then on. Points, each before what it names is seen by the worker:
// "message": a frame has left it. "deliver": one has come. "pull": half of a payload has come.
// "received": all of it. "sent": the receiver has it. "put": half of a put is done. "put_done":
// all of it. "flush": a flush has begun.
void StopAt(const std::string& point, const std::string& address);
bool Stopped();
void Continue();
// Nothing gets to this worker or from it any more, and no end is told.
void Cut(const std::string& address);

wire::UcxApi Api();

// Counts since Reset.
struct Counts {
  uint64_t messages = 0, payload_bytes = 0, live_requests = 0, registered = 0;
  uint64_t puts = 0, put_bytes = 0, refused_puts = 0, flushes = 0, live_keys = 0;
  uint64_t device_puts = 0, device_put_bytes = 0;  // among those puts: into memory of a GPU
  uint64_t puts_from_device = 0;                   // and from there
  uint64_t wrong_types = 0;  // payloads whose memory is registered as another type than was named
};
Counts counts();
// The transports that the last context was to use; empty: UCX's choice.
std::string Transports();

}  // namespace mla::fake_ucx

#endif  // MLA_TESTS_FAKE_UCX_FAKE_UCX_H_
