// Where the tensors of one attend lie in shared memory. Internal to the library.
//
// Tensors that the caller made in place (Session::Allocate) stay where they are. Others get blocks
// of the arena: inputs are copied in at once, outputs are copied out by TakeOutputs.
#ifndef MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_
#define MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/step_stream.h"
#include "proto/wire/thread_team.h"

namespace mla::client {

// Requests under way at a time that must find room, so pieces are at most this part of the arena.
inline constexpr uint64_t kPiecesInArena = 8;

struct TensorPlacement {
  std::span<std::byte> in, out;  // blocks of ours; empty when the tensors stay where they are
  uint64_t in_offset = 0, in_bytes = 0;
  uint64_t out_offset = 0, out_bytes = 0;
  bool on_device = false;  // the tensors lie in the ring's device memory
};

// Places `inputs` and the outputs of `pending`. False when there is no room now;
// nothing is held then.
bool PlaceTensors(SharedMemory* memory, wire::ThreadTeam* copier, const InputTensors& inputs,
                  const PendingReply& pending, TensorPlacement* placement);
// True if a call of these tensors copies nothing, so that it need not be split either.
bool AreInPlace(const SharedMemory& memory, const InputTensors& inputs,
                const PendingReply& pending);
// INVALID_ARGUMENT when some of the tensors, and not all, lie in device memory as it demands: the
// host can copy none of those.
absl::Status CheckDevicePlaces(const SharedMemory& memory, const InputTensors& inputs,
                               const PendingReply& pending);
// Copies what the server wrote to where `pending` wants it, if it is not there already.
void TakeOutputs(const TensorPlacement& placement, wire::ThreadTeam* copier,
                 const PendingReply& pending);
// Gives the blocks back. REQUIRES: the server does not use them any more.
void FreeTensors(SharedMemory* memory, TensorPlacement* placement);

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_TENSOR_PLACEMENT_H_
