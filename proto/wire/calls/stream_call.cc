#include "proto/wire/calls/stream_call.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>

namespace mla::wire {
namespace {

using google::protobuf::MessageLite;
using Traits = grpc::SerializationTraits<MessageLite>;

}  // namespace

StreamCall::StreamCall(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                       const std::string& method)
    : context_(context), call_(grpc::GenericStub(channel).PrepareCall(context, method, &queue_)) {
  call_->StartCall(this);
  open_ = Done();
}

StreamCall::~StreamCall() {
  if (!finished_) {
    context_->TryCancel();
    Finish();
  }
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool StreamCall::Done() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

void StreamCall::Fail(const std::string& fault) {
  fault_ = fault;
  // The server may send more, or never end the call.
  context_->TryCancel();
}

bool StreamCall::Write(const MessageLite& message, bool more) {
  if (!open_) return false;
  grpc::ByteBuffer bytes;
  bool own = false;
  if (!Traits::Serialize(message, &bytes, &own).ok()) {
    Fail("a message to the server is too large: " + message.GetTypeName());
    return open_ = false;
  }
  return Write(bytes, more);
}

bool StreamCall::Write(const grpc::ByteBuffer& bytes, bool more) {
  if (!open_) return false;
  grpc::WriteOptions options;
  if (more) options.set_buffer_hint();
  call_->Write(bytes, options, this);
  return open_ = Done();
}

bool StreamCall::AwaitInitialMetadata() {
  if (!fault_.empty()) return false;
  call_->ReadInitialMetadata(this);
  return Done();
}

void StreamCall::WritesDone() {
  if (!open_) return;
  open_ = false;
  call_->WritesDone(this);
  Done();
}

bool StreamCall::Read(MessageLite* message) {
  if (!fault_.empty()) return false;
  grpc::ByteBuffer bytes;
  call_->Read(&bytes, this);
  if (!Done()) return false;
  if (Traits::Deserialize(&bytes, message).ok()) return true;
  Fail("the server's message is not a " + message->GetTypeName());
  return false;
}

grpc::Status StreamCall::Finish() {
  finished_ = true;
  grpc::Status status;
  call_->Finish(&status, this);
  Done();
  return fault_.empty() ? status : grpc::Status(grpc::StatusCode::INTERNAL, fault_);
}

grpc::Status StreamCall::FinishWith(MessageLite* reply) {
  WritesDone();
  const bool any = Read(reply);
  if (any) {
    grpc::ByteBuffer more;
    call_->Read(&more, this);
    if (Done()) Fail("the server has sent more than one " + reply->GetTypeName());
  }
  const grpc::Status status = Finish();
  if (any || !status.ok()) return status;
  return {grpc::StatusCode::INTERNAL, "the server has sent no " + reply->GetTypeName()};
}

}  // namespace mla::wire
