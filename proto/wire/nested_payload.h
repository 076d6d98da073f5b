// Reads and writes messages whose bulk bytes lie below their top level, such as ImportRequest {
// part { chunk { payload } } }, without passing the payload through protobuf.
//
// Such a message has one usual form: each field of `path` inside the one before it and alone there;
// in the last of them small numbers, and the payload (field 2047) as the end. Writers produce only
// that form. Readers leave every other form to protobuf, which also reports malformed bytes.
// tensor_codec.h does the same for payloads at the top level.
//
// Pure functions; any thread.
#ifndef MLA_PROTO_WIRE_NESTED_PAYLOAD_H_
#define MLA_PROTO_WIRE_NESTED_PAYLOAD_H_

#include <cstddef>
#include <span>
#include <string>

#include "proto/wire/tensor_codec.h"

namespace mla::wire {

// A message that is read here has at most this number of bytes in front of its payload.
inline constexpr size_t kMostNestedHeader = 96;

// Replaces `out` by all that comes before the payload. `inside`: the message at the end of `path`,
// without its payload. REQUIRES: payload_size > 0.
void EncodeNested(std::span<const int> path, const google::protobuf::MessageLite& inside,
                  size_t payload_size, std::string* out);

// Finds the payload of a message of the usual form, and replaces `inside` by the other bytes of the
// message at the end of `path`, which hold numbers only. Returns false for any other form.
bool ScanNested(std::span<const Fragment> fragments, std::span<const int> path, std::string* inside,
                PayloadRange* payload);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_NESTED_PAYLOAD_H_
