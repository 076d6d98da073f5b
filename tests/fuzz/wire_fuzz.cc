// Compares the scanners of attend messages, and of messages with a payload further inside, with
// protobuf: every message that they accept must be read as protobuf reads it.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "proto/wire/attend_codec.h"
#include "proto/wire/nested_payload.h"
#include "proto/wire/tensor_codec.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

// The first byte gives the length of the fragments.
std::vector<wire::Fragment> Cut(const std::string& input, std::string* bytes) {
  if (input.empty()) return {};
  *bytes = input.substr(1);
  const size_t step = 1 + static_cast<unsigned char>(input[0]) % 64;
  std::vector<wire::Fragment> fragments;
  for (size_t at = 0; at < bytes->size(); at += step) {
    fragments.emplace_back(reinterpret_cast<const std::byte*>(bytes->data()) + at,
                           std::min(step, bytes->size() - at));
  }
  return fragments;
}

// Returns "", or how `header` and the payload's place differ from protobuf's reading.
template <typename Message>
std::string Compare(const std::string& bytes, const Message& header,
                    const wire::PayloadRange& range) {
  Message whole;
  if (!whole.ParseFromString(bytes)) return "accepted bytes that protobuf refuses";
  if (range.offset > bytes.size() || range.size > bytes.size() - range.offset) {
    return absl::StrCat("payload at ", range.offset, " + ", range.size, " of ", bytes.size());
  }
  if (whole.payload() != bytes.substr(range.offset, range.size)) return "another payload";
  whole.clear_payload();
  return whole.SerializeAsString() == header.SerializeAsString() ? "" : "another header";
}

template <typename Message, typename Fast>
std::string CheckOne(const std::string& input, Fast fast) {
  std::string bytes, header_bytes;
  const std::vector<wire::Fragment> fragments = Cut(input, &bytes);
  wire::PayloadRange range;
  Message header;
  std::string fault;
  if (wire::ScanMessage(fragments, &header_bytes, &range).ok() &&
      header.ParseFromString(header_bytes)) {
    fault = Compare(bytes, header, range);
    if (!fault.empty()) return "ScanMessage: " + fault;
    std::string gathered(range.size, '\0');
    wire::GatherBytes(fragments, range.offset, range.size,
                      reinterpret_cast<std::byte*>(gathered.data()));
    if (gathered != bytes.substr(range.offset, range.size)) return "GatherBytes: other bytes";
  }
  header.set_tag(99);  // left from an earlier use
  if (fast(fragments, &header, &range)) {
    fault = Compare(bytes, header, range);
    if (!fault.empty()) return "the fast form: " + fault;
  }
  return "";
}

// `inside` returns the message with the payload, in a message of the contract.
template <typename Message, typename Inside>
std::string CheckNested(const std::string& input, std::initializer_list<int> path, Inside inside) {
  std::string bytes, header;
  const std::vector<wire::Fragment> fragments = Cut(input, &bytes);
  wire::PayloadRange range;
  if (!wire::ScanNested(fragments, path, &header, &range)) return "";
  Message whole, framed;
  if (!whole.ParseFromString(bytes)) return "accepted bytes that protobuf refuses";
  if (range.offset > bytes.size() || range.size != bytes.size() - range.offset) {
    return absl::StrCat("payload at ", range.offset, " + ", range.size, " of ", bytes.size());
  }
  if (!inside(framed)->ParseFromString(header)) return "a header that protobuf refuses";
  inside(framed)->set_payload(bytes.substr(range.offset));
  return framed.SerializeAsString() == whole.SerializeAsString() ? "" : "another message";
}

std::string CheckRows(const std::string& input) {
  return CheckNested<v1::ImportRequest>(
      input, {v1::ImportRequest::kPartFieldNumber, v1::PagesPart::kChunkFieldNumber},
      [](v1::ImportRequest& message) { return message.mutable_part()->mutable_chunk(); });
}

std::string CheckWeights(const std::string& input) {
  return CheckNested<v1::UploadWeightsRequest>(
      input, {v1::UploadWeightsRequest::kChunkFieldNumber},
      [](v1::UploadWeightsRequest& message) { return message.mutable_chunk(); });
}

std::vector<std::string> Seeds() {
  v1::AttendStreamRequest request, begin, end;
  request.set_tag(300);
  v1::Attend* const attend = request.mutable_attend();
  attend->set_step_id(1u << 20);
  attend->set_layer(60);
  attend->set_row_count(2);
  attend->set_num_heads(128);
  attend->set_profile(v1::PROFILE_EXPANDED);
  attend->set_has_kv(true);
  attend->set_timeout_us(1u << 30);
  v1::AttendStreamRequest shared = request;
  shared.mutable_shared()->set_handle("0123456789abcdef");
  shared.mutable_shared()->set_in_length(1u << 20);
  shared.mutable_shared()->set_out_offset(1u << 20);
  request.set_payload("payload bytes");
  begin.mutable_begin_step()->set_model_id("m");
  begin.mutable_begin_step()->add_sequences()->set_sequence_id(7);
  end.mutable_end_step()->add_committed_rows(3);
  v1::AttendStreamReply reply, error;
  reply.set_tag(300);
  reply.set_boot_id(1234567);
  reply.mutable_attend()->set_row_count(2);
  reply.mutable_timings()->set_queue_us(40);
  reply.set_payload("output");
  error.mutable_error()->set_code(3);
  v1::ImportRequest rows;
  rows.mutable_part()->mutable_chunk()->set_payload("some rows");
  v1::UploadWeightsRequest weights;
  weights.mutable_chunk()->set_layer(60);
  weights.mutable_chunk()->set_head_begin(300);
  weights.mutable_chunk()->set_payload("weights");
  std::vector<std::string> seeds;
  for (const google::protobuf::Message* message :
       std::initializer_list<const google::protobuf::Message*>{&request, &shared, &begin, &end,
                                                               &reply, &error, &rows, &weights}) {
    seeds.push_back("\x3f" + message->SerializeAsString());
    seeds.push_back(std::string(1, '\0') + message->SerializeAsString());
  }
  // Once revealed a fault: a length of eight bytes, which protobuf does not read.
  seeds.push_back("\x3f\x08\x02\x1a" + std::string(7, '\x80') + '\0');
  // The same for the payload, whose tag and length are not in the header.
  seeds.push_back("\x3f\xfa\x7f" + std::string(7, '\x80') + '\0');
  seeds.push_back("\x3f\xfa\xff" + std::string(4, '\x80') + std::string(2, '\0'));
  return seeds;
}

std::string CheckAll(const std::string& input) {
  const std::string fault = CheckOne<v1::AttendStreamRequest>(input, wire::ScanAttend);
  if (!fault.empty()) return "request: " + fault;
  const std::string other = CheckOne<v1::AttendStreamReply>(input, wire::ScanAttendReply);
  if (!other.empty()) return "reply: " + other;
  const std::string rows = CheckRows(input);
  if (!rows.empty()) return "rows: " + rows;
  const std::string weights = CheckWeights(input);
  return weights.empty() ? weights : "weights: " + weights;
}

}  // namespace

FuzzTarget TargetUnderTest() { return {.seeds = Seeds(), .executions = 50000}; }

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckAll({reinterpret_cast<const char*>(data), size}));
  return 0;
}
