// The wire form of attend requests and of their replies, read and written without protobuf's
// parser.
//
// Nearly every message of a stream is one of the two, and they have only a few numbers in addition
// to the tensors: a loop over those touches less memory than a general parser, which counts while a
// processor is just waking up. Unusual messages (other bodies, unknown or repeated fields, a header
// that spans fragments) are left to tensor_codec.h and protobuf, which also report the fault of a
// malformed message.
//
// Pure functions; any thread.
#ifndef MLA_PROTO_WIRE_ATTEND_CODEC_H_
#define MLA_PROTO_WIRE_ATTEND_CODEC_H_

#include <cstddef>
#include <span>

#include "mla/v1/attention.pb.h"
#include "proto/wire/tensor_codec.h"

namespace mla::wire {

// At most this number of bytes comes before the payload.
inline constexpr size_t kMaxAttendHeaderBytes = 224;

// Replaces the contents of the message by an attend request or reply, as ScanMessage and protobuf
// together would. Returns false if the form is not the usual one; the message is then undefined.
bool ScanAttend(std::span<const Fragment> fragments, v1::AttendStreamRequest* request,
                PayloadRange* payload);
bool ScanAttendReply(std::span<const Fragment> fragments, v1::AttendStreamReply* reply,
                     PayloadRange* payload);

// Writes the same bytes as EncodeHeader and returns their number. Returns 0 and writes nothing if
// the message does not have the usual form. REQUIRES: room for kMaxAttendHeaderBytes.
size_t EncodeAttend(const v1::AttendStreamRequest& request, size_t payload_size, char* out);
size_t EncodeAttendReply(const v1::AttendStreamReply& reply, size_t payload_size, char* out);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_ATTEND_CODEC_H_
