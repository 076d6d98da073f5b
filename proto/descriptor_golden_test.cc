// Fails when a released field of mla.v1 changes number, type or label, or disappears. Additions
// fail too, so that they are made on purpose: replace the golden file with the text that the
// failure shows.
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "mla/v1/admin.pb.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/checkpoint.pb.h"
#include "mla/v1/error.pb.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"
#include "mla/v1/tensor.pb.h"
#include "mla/v1/transport.pb.h"

namespace mla {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

void List(const EnumDescriptor* type, std::vector<std::string>* lines) {
  for (int i = 0; i < type->value_count(); ++i) {
    lines->push_back("enum " + type->full_name() + " " + std::to_string(type->value(i)->number()) +
                     " " + type->value(i)->name());
  }
}

std::string TypeOf(const FieldDescriptor* field) {
  if (field->message_type() != nullptr) return field->message_type()->full_name();
  if (field->enum_type() != nullptr) return field->enum_type()->full_name();
  return field->type_name();
}

void List(const Descriptor* type, std::vector<std::string>* lines) {
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* field = type->field(i);
    std::string line = "field " + type->full_name() + " " + std::to_string(field->number()) + " " +
                       field->name() + " " + TypeOf(field);
    if (field->is_repeated()) line += " repeated";
    if (field->has_optional_keyword()) line += " optional";
    if (field->real_containing_oneof() != nullptr) {
      line += " oneof=" + field->real_containing_oneof()->name();
    }
    lines->push_back(line);
  }
  for (int i = 0; i < type->reserved_range_count(); ++i) {
    lines->push_back("reserved " + type->full_name() + " " +
                     std::to_string(type->reserved_range(i)->start) + ".." +
                     std::to_string(type->reserved_range(i)->end - 1));
  }
  for (int i = 0; i < type->nested_type_count(); ++i) List(type->nested_type(i), lines);
  for (int i = 0; i < type->enum_type_count(); ++i) List(type->enum_type(i), lines);
}

void List(const FileDescriptor* file, std::vector<std::string>* lines) {
  for (int i = 0; i < file->message_type_count(); ++i) List(file->message_type(i), lines);
  for (int i = 0; i < file->enum_type_count(); ++i) List(file->enum_type(i), lines);
  for (int s = 0; s < file->service_count(); ++s) {
    for (int i = 0; i < file->service(s)->method_count(); ++i) {
      const auto* method = file->service(s)->method(i);
      lines->push_back("rpc " + method->full_name() +
                       (method->client_streaming() ? " stream " : " ") +
                       method->input_type()->full_name() +
                       (method->server_streaming() ? " -> stream " : " -> ") +
                       method->output_type()->full_name());
    }
  }
}

TEST(DescriptorGoldenTest, NothingReleasedHasChanged) {
  std::vector<std::string> lines;
  for (const FileDescriptor* file :
       {v1::AttendStreamRequest::descriptor()->file(), v1::OpenRequest::descriptor()->file(),
        v1::ModelSpec::descriptor()->file(), v1::GetStatsReply::descriptor()->file(),
        v1::Geometry::descriptor()->file(), v1::ErrorDetail::descriptor()->file(),
        v1::PagesHeader::descriptor()->file(), v1::CheckpointHeader::descriptor()->file(),
        v1::OpenUcxRequest::descriptor()->file()}) {
    List(file, &lines);
  }
  std::sort(lines.begin(), lines.end());
  std::string now;
  for (const std::string& line : lines) now += line + "\n";
  std::ifstream file("proto/descriptor_golden.txt");
  std::ostringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(golden.str(), now);
}

}  // namespace
}  // namespace mla
