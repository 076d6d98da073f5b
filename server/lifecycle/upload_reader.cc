#include "server/lifecycle/upload_reader.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/wire/nested_payload.h"

namespace mla::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormat;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Returns true if the parser accepts a value of this wire type for the field.
bool Fits(const FieldDescriptor& field, WireFormatLite::WireType type) {
  if (field.is_packable() && type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED) return true;
  return type == WireFormat::WireTypeForFieldType(field.type());
}

// Takes the unknown fields of a message from `remaining`. Returns true if there are no more than
// that. The count ends at malformed bytes.
bool TakeUnknown(CodedInputStream* in, const Descriptor& contract, int* remaining) {
  int groups = 0;  // open groups; the contract has none, so all their fields are unknown
  while (const uint32_t tag = in->ReadTag()) {
    const auto type = WireFormatLite::GetTagWireType(tag);
    const FieldDescriptor* field =
        groups > 0 ? nullptr : contract.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const bool known = field != nullptr && Fits(*field, type);
    if (!known && --*remaining < 0) return false;
    if (type == WireFormatLite::WIRETYPE_START_GROUP) {
      ++groups;
    } else if (type == WireFormatLite::WIRETYPE_END_GROUP) {
      if (--groups < 0) return true;
    } else if (known && field->message_type() != nullptr) {
      uint32_t bytes = 0;
      if (!in->ReadVarint32(&bytes) || bytes > INT32_MAX) return true;
      const CodedInputStream::Limit outer = in->PushLimit(static_cast<int>(bytes));
      if (!TakeUnknown(in, *field->message_type(), remaining)) return false;
      if (in->BytesUntilLimit() > 0) return true;
      in->PopLimit(outer);
    } else if (!WireFormatLite::SkipField(in, tag)) {
      return true;
    }
  }
  return true;
}

}  // namespace

int MethodIndex(const char* name) {
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name)->index();
}

absl::Status CheckUnknownFields(const grpc::ByteBuffer& bytes, const Descriptor& contract) {
  // The reader takes a pointer to non-const but changes nothing.
  grpc::ProtoBufferReader reader(const_cast<grpc::ByteBuffer*>(&bytes));
  CodedInputStream in(&reader);
  int left = kMostUnknownFields;
  if (!reader.status().ok() || TakeUnknown(&in, contract, &left)) return absl::OkStatus();
  return RefuseField("request", absl::StrCat("more than ", kMostUnknownFields, " unknown fields"),
                     absl::StrCat("a serialized ", contract.full_name()), "malformed");
}

bool UploadReader::TakePayload(const grpc::ByteBuffer& bytes, UploadPayload* bulk) {
  if (!bytes.Dump(&slices_).ok()) return false;
  std::vector<wire::Fragment> fragments;
  fragments.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) {
    fragments.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  wire::PayloadRange range;
  const bool matched = wire::ScanNested(fragments, bulk->path, &bulk->inside, &range);
  if (matched) {
    bulk->payload->resize(range.size);
    wire::GatherBytes(fragments, range.offset, range.size,
                      reinterpret_cast<std::byte*>(bulk->payload->data()));
  }
  slices_.clear();
  return matched;
}

void UploadReader::Accept(const char* key) {
  call_->AddInitialMetadata(key, "1");
  in_->SendInitialMetadata();
}

absl::StatusOr<bool> UploadReader::Read(google::protobuf::Message* message) {
  return Read(message, nullptr);
}

absl::StatusOr<bool> UploadReader::Read(google::protobuf::Message* message, UploadPayload* bulk) {
  grpc::ByteBuffer bytes;
  idle_->Waits(call_);
  const bool read = in_->Read(&bytes);
  idle_->Works(call_);
  if (!read) return false;
  if (bulk != nullptr && (bulk->found = TakePayload(bytes, bulk))) return true;
  MLA_RETURN_IF_ERROR(CheckUnknownFields(bytes, *message->GetDescriptor()));
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
    return RefuseField("request", "undecodable bytes",
                       absl::StrCat("a serialized ", message->GetDescriptor()->full_name()),
                       "malformed");
  }
  return true;
}

}  // namespace mla::server
