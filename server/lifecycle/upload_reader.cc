#include "server/lifecycle/upload_reader.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Takes the fields of a message from `left`; false when there are more. What is malformed ends the
// count: the parser refuses it.
bool TakeFields(CodedInputStream* in, const Descriptor& contract, int* left) {
  while (const uint32_t tag = in->ReadTag()) {
    if (--*left < 0) return false;
    const auto type = WireFormatLite::GetTagWireType(tag);
    // What is in a group is counted as if it lay beside it.
    if (type == WireFormatLite::WIRETYPE_START_GROUP ||
        type == WireFormatLite::WIRETYPE_END_GROUP) {
      continue;
    }
    const FieldDescriptor* field =
        contract.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const bool nested = type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED && field != nullptr &&
                        field->message_type() != nullptr;
    if (!nested) {
      if (!WireFormatLite::SkipField(in, tag)) return true;
      continue;
    }
    uint32_t bytes = 0;
    if (!in->ReadVarint32(&bytes) || bytes > INT32_MAX) return true;
    const CodedInputStream::Limit outer = in->PushLimit(static_cast<int>(bytes));
    if (!TakeFields(in, *field->message_type(), left)) return false;
    if (in->BytesUntilLimit() > 0) return true;
    in->PopLimit(outer);
  }
  return true;
}

}  // namespace

int MethodIndex(const char* name) {
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name)->index();
}

absl::StatusOr<bool> UploadReader::Read(google::protobuf::Message* message) {
  grpc::ByteBuffer bytes;
  idle_->Waits(call_);
  const bool read = in_->Read(&bytes);
  idle_->Works(call_);
  if (!read) return false;
  int left = kMostFields;
  {
    grpc::ProtoBufferReader reader(&bytes);
    CodedInputStream in(&reader);
    if (!TakeFields(&in, *message->GetDescriptor(), &left)) {
      return RefuseField("request", absl::StrCat("more than ", kMostFields, " fields"),
                         absl::StrCat("those of ", message->GetDescriptor()->full_name()),
                         "malformed");
    }
  }
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
    return RefuseField("request", "undecodable bytes",
                       absl::StrCat("a serialized ", message->GetDescriptor()->full_name()),
                       "malformed");
  }
  return true;
}

}  // namespace mla::server
