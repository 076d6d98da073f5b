// The frames of a command ring that is carried over UCX, byte by byte (docs/rdma.md).
//
// Frames are active messages of UCX between the workers of a client and of the server's side. Each
// has one of the headers below and a payload. The client has a mirror of the server's region
// (ring_layout.h): of the same size, with the same offsets. The payload of a frame lies at
// `place` in the sender's copy and goes to the same offset of the receiver's copy.
//
// With puts, which both ends must want, the sender may have put a payload into the receiver's arena
// before it sends the frame, which then has none: the client by the key of OpenUcxReply, the
// server's side by the key of the client's UcxKeyFrame. That frame is the client's first, and has
// no number; replies are sent as payloads until it has come.
//
// A client that has a key of device memory (OpenUcxReply) may put the inputs of an attend there.
// Byte d of that memory belongs to byte d of the arena. The entry then has kEntryOnDevice, its
// offsets count from the start of the device memory, and the frame has no payload. The outputs are
// put into the arena of the client at the same offset, so no such entry may come without a key of
// the client; completions are kept until the key has come.
//
// A client numbers its requests from 0 on, the server's side its completions. Frames may arrive in
// any order; receivers use them in the order of their numbers. At most `entries` requests may be in
// flight: request n may be sent once completion n - entries was taken.
//
// If both ends take them, several frames may travel as one message (frame_batch.h).
//
// Integers are little endian; everything is naturally aligned. Plain data: any thread.
#ifndef MLA_PROTO_WIRE_UCX_FRAMES_H_
#define MLA_PROTO_WIRE_UCX_FRAMES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "proto/wire/ring_layout.h"

namespace mla::wire {

inline constexpr uint32_t kUcxVersion = 1;
// The id of the active message, in both directions.
inline constexpr unsigned kUcxFrameId = 1;
inline constexpr size_t kUcxTokenBytes = 16;
inline constexpr size_t kUcxMostAddressBytes = 16384;
inline constexpr size_t kUcxMostKeyBytes = 4096;

using UcxToken = std::array<uint8_t, kUcxTokenBytes>;

// The client sends this to the server for an entry. Payload: its input tensors, or its message with
// the tails in front.
struct UcxRequestFrame {
  UcxToken token;
  uint64_t number;
  uint64_t place;      // in the arena; 0 without a payload
  uint64_t out_bytes;  // of the outputs, at entry.out_offset
  SubmissionEntry entry;
};

// The server sends this to the client. Payload: the outputs of an attend, at the place that the
// request named; or a message, at entry.message_offset.
struct UcxCompletionFrame {
  UcxToken token;
  uint64_t number;
  uint64_t place;
  CompletionEntry entry;
};

// The client sends this to the server, once: its memory for outputs. Payload: its key, as UCX packs
// it.
struct UcxKeyFrame {
  UcxToken token;
  uint64_t address;  // of the arena of the client's mirror, in the client's process
  uint64_t bytes;    // of that arena
};

static_assert(sizeof(UcxKeyFrame) == 32 && std::is_trivially_copyable_v<UcxKeyFrame>);
static_assert(sizeof(UcxRequestFrame) == 104 && std::is_trivially_copyable_v<UcxRequestFrame>);
static_assert(sizeof(UcxCompletionFrame) == 96 && std::is_trivially_copyable_v<UcxCompletionFrame>);

// Reads a frame's header. Returns false unless the header has exactly this frame's size and token.
// Takes the same time wherever a wrong token differs.
template <typename Frame>
bool ReadFrame(std::span<const std::byte> header, const UcxToken& token, Frame* frame) {
  if (header.size() != sizeof(Frame)) return false;
  std::memcpy(frame, header.data(), sizeof(Frame));
  unsigned difference = 0;
  for (size_t i = 0; i < token.size(); ++i) {
    difference |= static_cast<unsigned>(frame->token[i]) ^ token[i];
  }
  return difference == 0;
}

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_UCX_FRAMES_H_
