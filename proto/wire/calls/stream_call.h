// Runs a call that streams messages, whose other end may send anything.
//
// The generated stubs must not be used for such calls. Their synchronous writer ends the process if
// a server's reply is not a message of the contract. Their callbacks take such a reply for a good
// one, and their readers wait for a status that the server may never send.
//
//   wire::StreamCall call(channel, &context, "/mla.v1.Cache/Import");
//   while (...) if (!call.Write(part)) break;  // false: the call has ended, Finish says why
//   const grpc::Status status = call.FinishWith(&reply);
//
// Each method blocks until its operation is done or the call ends: by its deadline, by
// ClientContext::TryCancel, or by the server.
//
// Ownership: borrows the context. Threading: one thread; TryCancel from any thread.
#ifndef MLA_PROTO_WIRE_CALLS_STREAM_CALL_H_
#define MLA_PROTO_WIRE_CALLS_STREAM_CALL_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>

namespace mla::wire {

class StreamCall final {
 public:
  // Starts the call. `method`: its path, as "/mla.v1.Cache/Import".
  StreamCall(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
             const std::string& method);
  // Cancels the call unless it was finished.
  ~StreamCall();
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  // Sends a message. Returns false if the call has ended. `more`: another message follows at once,
  // so this one may wait for it.
  bool Write(const google::protobuf::MessageLite& message, bool more = false);
  // Sends a serialized message.
  bool Write(const grpc::ByteBuffer& bytes, bool more = false);
  // Waits for the server's initial metadata, which the context has then. Returns false if the call
  // has ended without it. At most once, before Read and Finish.
  bool AwaitInitialMetadata();
  // Tells the server that no message follows. Call it once at most.
  void WritesDone();
  // Receives a message. Returns false at the end of the call, or if the bytes are not such a
  // message.
  bool Read(google::protobuf::MessageLite* message);

  // Returns how the call has ended. INTERNAL if Read met bytes that are not a message, or a message
  // was too large to be sent. REQUIRES: WritesDone was called, and Read has returned false or the
  // call is cancelled. Once.
  grpc::Status Finish();
  // Ends the requests of a call whose server answers with one message, reads that message, and
  // returns the status of the call. INTERNAL if a server that reports OK has sent no message, more
  // than one, or malformed bytes; `reply` is meaningless unless the status is OK.
  grpc::Status FinishWith(google::protobuf::MessageLite* reply);

 private:
  // Cancels the call, which then ends with INTERNAL and this text.
  void Fail(const std::string& fault);
  // Waits for the one operation that was started; returns true if it has succeeded.
  bool Done();

  grpc::ClientContext* const context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool open_ = false;      // requests may be sent
  bool finished_ = false;  // Finish was called
  std::string fault_;      // fault of the messages; empty: no fault
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_CALLS_STREAM_CALL_H_
