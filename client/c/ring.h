// The opaque types of mla_ring.h.
//
// Ownership and threading: as mla_ring.h says.
#ifndef MLA_CLIENT_C_RING_H_
#define MLA_CLIENT_C_RING_H_

#include <cstdint>
#include <memory>
#include <string>

#include "client/cpp/streams/ring_stream.h"
#include "client/cpp/ucx/ucx_memory.h"

struct mla_ring {
  std::shared_ptr<mla::client::RingStream> stream;
  uint64_t boot_id = 0;
  std::string why_no_device, why_no_chains, warning;
  mla::client::UcxMemory* ucx = nullptr;  // the stream's; null: another kind of ring
};

struct mla_request {
  std::shared_ptr<mla::client::RingStream> stream;
  std::shared_ptr<mla::client::PendingReply> pending;
  std::string reply;
};

#endif  // MLA_CLIENT_C_RING_H_
