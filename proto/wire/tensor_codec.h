// The wire form of Attend messages: headers are parsed, tensor bytes are only located.
//
// A received message is a row of fragments (gRPC slices). ScanMessage walks its top-level fields.
// It collects every field except `payload` (field 2047) into a small header buffer, and records the
// place of the payload. GatherBytes then copies the payload once, to its final place. Any order of
// fields is accepted, as protobuf demands; of several payloads the last counts. A reply is framed
// the other way round: header bytes that end with the payload's tag and length, then the payload's
// own memory.
//
// Depends neither on gRPC nor on a particular message. Pure functions; any thread.
#ifndef MLA_PROTO_WIRE_TENSOR_CODEC_H_
#define MLA_PROTO_WIRE_TENSOR_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class MessageLite;
}  // namespace google::protobuf

namespace mla::wire {

using Fragment = std::span<const std::byte>;

inline constexpr int kPayloadField = 2047;
// A message has at most this number of header bytes; a BeginStep of 65536 sequences fits.
inline constexpr size_t kMaxHeaderBytes = size_t{4} << 20;

struct PayloadRange {
  size_t offset = 0;  // from the start of the message
  size_t size = 0;
};

// Splits a message into header bytes (appended to the cleared `header`) and the payload's place.
// INVALID_ARGUMENT when the bytes are not a protobuf message or the header exceeds `most_header`. A
// parsed header can take many times its bytes, so it is bounded before it is parsed.
absl::Status ScanMessage(std::span<const Fragment> fragments, std::string* header,
                         PayloadRange* payload, size_t most_header = kMaxHeaderBytes);

// Copies `size` bytes from `offset` of the message. REQUIRES: offset + size <= total size.
void GatherBytes(std::span<const Fragment> fragments, size_t offset, size_t size,
                 std::byte* target);

// Serializes `header`, which has no payload, and after it the frame of a payload of `payload_size`
// bytes unless that is 0. Replaces the contents of `out`.
void EncodeHeader(const google::protobuf::MessageLite& header, size_t payload_size,
                  std::string* out);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_TENSOR_CODEC_H_
