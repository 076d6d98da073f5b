// The validators with arbitrary messages. Accepted messages must keep every bound that the
// scheduler relies on, and refusals must name a field.
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/grpc/request_validator.h"
#include "server/grpc/weights_chunk.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

using scheduler::Limits;

scheduler::ModelSpec Model() {
  scheduler::ModelSpec model;
  model.id = std::string(1, 'm');  // GCC 12 warns of the literal
  model.geometry = {4, 32, 8, 16, 16};
  model.layers = 2;
  model.softmax_scale = 0.5;
  model.page_size = 16;
  return model;
}

// Returns "" if a refusal has all that a client needs.
std::string CheckRefusal(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) && !absl::IsFailedPrecondition(status)) {
    return absl::StrCat("refused as ", status.ToString());
  }
  const ErrorDetail detail = DetailOf(status);
  if (detail.field.empty() || detail.limit.empty() || detail.reason.empty()) {
    return absl::StrCat("a refusal that explains nothing: ", status.ToString());
  }
  return "";
}

std::string CheckBegin(const v1::BeginStep& message) {
  const Limits limits;
  scheduler::BeginStepArgs args;
  int32_t total = 0;
  const absl::Status status = server::ParseBeginStep(message, limits, &args, &total);
  if (!status.ok()) return CheckRefusal(status);
  int64_t sum = 0;
  for (const scheduler::StepSequenceArgs& sequence : args.sequences) {
    if (sequence.rows < 1 || sequence.start_position < 0) return "a sequence without rows";
    sum += sequence.rows;
  }
  if (sum != total || sum > limits.max_step_rows) return absl::StrCat("rows ", sum, ", ", total);
  if (args.participants < 1 || args.participants > limits.max_participants) return "participants";
  return args.lease_ms >= 0 && args.lease_ms <= limits.max_lease_ms ? "" : "lease";
}

std::string CheckAttend(const v1::Attend& message, int32_t total_rows, int64_t payload) {
  const scheduler::ModelSpec model = Model();
  scheduler::AttendArgs args;
  server::AttendSizes sizes;
  constexpr int64_t kMessage = 1 << 20;
  const absl::Status status =
      server::ParseAttend(message, model, total_rows, payload, kMessage, &args, &sizes);
  if (!status.ok()) return CheckRefusal(status);
  if (args.layer < 0 || args.layer >= model.layers) return "layer";
  if (args.row_begin < 0 || args.row_count < 1 || args.row_begin + args.row_count > total_rows) {
    return absl::StrCat("rows ", args.row_begin, " + ", args.row_count, " of ", total_rows);
  }
  if (args.head_offset < 0 || args.num_heads < 0 ||
      args.head_offset + args.num_heads > model.geometry.num_heads) {
    return absl::StrCat("heads ", args.head_offset, " + ", args.num_heads);
  }
  if (sizes.kv_bytes < 0 || sizes.q_bytes < 0 || sizes.o_bytes < 0 || sizes.lse_bytes < 0 ||
      sizes.o_bytes + sizes.lse_bytes > kMessage) {
    return "sizes";
  }
  if (payload != server::kTensorsElsewhere && sizes.kv_bytes + sizes.q_bytes != payload) {
    return "a payload of another size";
  }
  if (args.has_kv && sizes.kv_bytes % (args.row_count * int64_t{40}) != 0) return "kv bytes";
  return "";
}

template <typename Message, typename Parse>
std::string CheckParsed(const std::string& bytes, Parse parse) {
  Message message;
  if (!message.ParseFromString(bytes)) return "";
  const absl::Status status = parse(message);
  return status.ok() ? "" : CheckRefusal(status);
}

std::string CheckUnary(const std::string& bytes) {
  const Limits limits;
  scheduler::SequenceSelection selection;
  scheduler::SequencePage page;
  int64_t number = 0;
  const std::string faults[] = {
      CheckParsed<v1::ModelSpec>(bytes,
                                 [&](const auto& m) {
                                   scheduler::ModelSpec spec;
                                   return server::ParseModelSpec(m, limits, &spec);
                                 }),
      CheckParsed<v1::UploadWeightsRequest::Chunk>(
          bytes, [&](const auto& m) { return server::ParseWeightsChunk(m, Model(), &number); }),
      CheckParsed<v1::OpenRequest>(bytes,
                                   [&](const auto& m) {
                                     scheduler::OpenArgs args;
                                     return server::ParseOpen(m, limits, &args);
                                   }),
      CheckParsed<v1::ForkRequest>(bytes,
                                   [&](const auto& m) {
                                     scheduler::ForkArgs args;
                                     return server::ParseFork(m, limits, &args);
                                   }),
      CheckParsed<v1::TruncateRequest>(
          bytes, [&](const auto& m) { return server::ParseTruncate(m, &number); }),
      CheckParsed<v1::GetRequest>(
          bytes, [&](const auto& m) { return server::ParseGet(m, limits, &selection, &page); }),
      CheckParsed<v1::RenewLeaseRequest>(
          bytes, [&](const auto& m) { return server::ParseRenew(m, limits, &selection, &number); }),
  };
  for (const std::string& fault : faults) {
    if (!fault.empty()) return fault;
  }
  return "";
}

std::string CheckOne(const std::string& input) {
  std::string fault = CheckUnary(input);
  v1::AttendStreamRequest request;
  if (!fault.empty() || !request.ParseFromString(input)) return fault;
  fault = CheckBegin(request.begin_step());
  const auto rows = static_cast<int32_t>(1 + request.tag() % 5);
  const auto payload = static_cast<int64_t>(request.payload().size());
  if (fault.empty()) fault = CheckAttend(request.attend(), rows, payload);
  if (fault.empty()) fault = CheckAttend(request.attend(), rows, server::kTensorsElsewhere);
  if (!fault.empty()) return fault;
  scheduler::EndStepArgs args;
  const absl::Status status = server::ParseEndStep(request.end_step(), Limits(), &args);
  return status.ok() ? "" : CheckRefusal(status);
}

}  // namespace

FuzzTarget TargetUnderTest() {
  v1::AttendStreamRequest begin, attend, append, end;
  begin.mutable_begin_step()->set_model_id("m");
  begin.mutable_begin_step()->set_participants(2);
  for (int i = 0; i < 3; ++i) begin.mutable_begin_step()->add_sequences()->set_rows(4096);
  attend.set_tag(3);
  attend.mutable_attend()->set_row_count(3);
  attend.mutable_attend()->set_num_heads(4);
  attend.mutable_attend()->set_profile(v1::PROFILE_EXPANDED);
  append = attend;
  append.mutable_attend()->set_profile(v1::PROFILE_APPEND_ONLY);
  append.mutable_attend()->set_has_kv(true);
  append.set_payload(std::string(240, 'k'));
  end.mutable_end_step()->add_committed_rows(8192);
  v1::ModelSpec model;
  model.set_model_id("m");
  model.mutable_geometry()->set_num_heads(128);
  model.mutable_geometry()->set_kv_lora_rank(512);
  model.mutable_geometry()->set_rope_dim(64);
  model.set_layers(61);
  model.set_softmax_scale(0.135234);
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  v1::ForkRequest fork;
  fork.set_length(1u << 31);
  fork.set_client_id("c");
  FuzzTarget target;
  for (const google::protobuf::Message* message :
       std::initializer_list<const google::protobuf::Message*>{&begin, &attend, &append, &end,
                                                               &model, &fork}) {
    target.seeds.push_back(message->SerializeAsString());
  }
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckOne({reinterpret_cast<const char*>(data), size}));
  return 0;
}
