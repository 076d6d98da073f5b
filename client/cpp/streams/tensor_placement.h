// Finds or makes places in shared memory for the tensors of one attend. Internal to the library.
//
// Tensors in memory of Session::Allocate are used in place. Others get blocks of the arena: inputs
// are copied in at once, outputs are copied out by TakeOutputs.
#ifndef MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_
#define MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "client/cpp/shared_memory/ring_memory.h"
#include "client/cpp/streams/step_stream.h"
#include "proto/wire/thread_team.h"

namespace mla::client {

// A piece of a request takes at most one of so many parts of the arena, so that several find room
// at a time.
inline constexpr uint64_t kPiecesInArena = 8;

struct TensorPlacement {
  std::span<std::byte> in, out;  // blocks taken here; empty if the tensors are used in place
  uint64_t in_offset = 0, in_bytes = 0;
  uint64_t out_offset = 0, out_bytes = 0;
  bool on_device = false;  // the tensors lie in the ring's device memory
};

// Places `inputs` and the outputs of `pending`. Returns false and takes nothing if there is not
// enough room now.
bool PlaceTensors(RingMemory* memory, wire::ThreadTeam* copier, const InputTensors& inputs,
                  const PendingReply& pending, TensorPlacement* placement);
// Returns true if a call with these tensors copies nothing, so that it need not be split.
bool AreInPlace(const RingMemory& memory, const InputTensors& inputs, const PendingReply& pending);
// Returns INVALID_ARGUMENT if only some of the tensors lie in device memory, or not as the ring
// requires, because the host cannot copy them.
absl::Status CheckDevicePlaces(const RingMemory& memory, const InputTensors& inputs,
                               const PendingReply& pending);
// Copies the outputs to the places in `pending` unless the server wrote them there.
void TakeOutputs(const TensorPlacement& placement, wire::ThreadTeam* copier,
                 const PendingReply& pending);
// Gives the blocks back. REQUIRES: the server does not use them any more.
void FreeTensors(RingMemory* memory, TensorPlacement* placement);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_
