// Reads the messages of an uploading client stream, one after another.
//
// gRPC normally parses a message before its handler sees it. A parsed message may take a hundred
// times its bytes: fields that the contract does not know, of two bytes each. So handlers of
// uploads take bytes (ServeUploadBytes), and a message with many such fields is refused unparsed.
//
// Threading: one thread at a time.
#ifndef MLA_SERVER_LIFECYCLE_UPLOAD_READER_H_
#define MLA_SERVER_LIFECYCLE_UPLOAD_READER_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/lifecycle/idle_calls.h"

namespace mla::server {

using UploadBytes = grpc::ServerReader<grpc::ByteBuffer>;

// Bound for one message, large enough for fields that a later contract may add.
inline constexpr int kMostUnknownFields = 1024;

// Looks at a serialized message before it is parsed. INVALID_ARGUMENT if it has more unknown fields
// than that, counting those inside its messages. Malformed bytes are left to the parser.
absl::Status CheckUnknownFields(const grpc::ByteBuffer& bytes,
                                const google::protobuf::Descriptor& contract);

// A message that consists mostly of a payload, read without protobuf (proto/wire/nested_payload.h).
struct UploadPayload {
  std::span<const int> path;       // the fields that lead to the message with the payload
  std::string* payload = nullptr;  // its bytes; memory is reused from message to message
  std::string inside{};            // other fields of that message, serialized
  bool found = false;              // the last message had this form
};

class UploadReader final {
 public:
  // While Read waits, the call counts as waiting for its client. All pointers must outlive the
  // reader.
  UploadReader(grpc::ServerContext* call, UploadBytes* in, IdleCalls* idle)
      : call_(call), in_(in), idle_(idle) {}

  // False: the stream has ended, or the call was cancelled. INVALID_ARGUMENT: the next bytes are
  // not such a message, or CheckUnknownFields refuses them.
  absl::StatusOr<bool> Read(google::protobuf::Message* message);
  // Does what Read does. If the next message has the form of `bulk`, fills that and leaves
  // `message` as it is.
  absl::StatusOr<bool> Read(google::protobuf::Message* message, UploadPayload* bulk);
  // Tells the client that its first message is accepted: sends the initial metadata, with `key`. At
  // most once.
  void Accept(const char* key);

 private:
  // Returns true if `bytes` have the form of `bulk`, and takes the payload out of them.
  bool TakePayload(const grpc::ByteBuffer& bytes, UploadPayload* bulk);

  grpc::ServerContext* const call_;
  UploadBytes* const in_;
  IdleCalls* const idle_;
  std::vector<grpc::Slice> slices_;  // of the present message
};

// For Service::MarkMethodStreamed: returns the index of a method, such as
// "mla.v1.Models.UploadWeights", in its service, and makes a handler that calls `Method` with bytes
// instead of parsed messages. `service` must outlive the handler.
int MethodIndex(const char* name);
template <auto Method, typename Reply, typename Service>
grpc::internal::MethodHandler* ServeUploadBytes(Service* service) {
  return new grpc::internal::ClientStreamingHandler<Service, grpc::ByteBuffer, Reply>(
      [](Service* self, grpc::ServerContext* call, UploadBytes* in, Reply* reply) {
        return (self->*Method)(call, in, reply);
      },
      service);
}

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_UPLOAD_READER_H_
