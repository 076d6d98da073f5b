#include "tests/integration/rpc/bad_input/field_rules.h"

#include <google/protobuf/descriptor.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/attention.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"

namespace mla::integration {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint64_t kHostile[] = {0,
                                 1,
                                 (uint64_t{1} << 31) - 1,
                                 uint64_t{1} << 31,
                                 (uint64_t{1} << 32) - 1,
                                 (uint64_t{1} << 63) - 1,
                                 kAnything};
constexpr uint64_t kMostPosition = (uint64_t{1} << 63) - 1;
constexpr uint64_t kMostLease = 3600000;
constexpr uint64_t kMostStepLease = 60000;
constexpr uint64_t kMostName = 128;
constexpr uint64_t kLongestText = 5000;

bool IsText(const FieldDescriptor* field) {
  return field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
}

// `value` as the field can hold it and as its rule counts it.
uint64_t Narrowed(const FieldDescriptor* field, uint64_t value) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return static_cast<uint32_t>(value);
    case FieldDescriptor::CPPTYPE_BOOL:
      return value != 0 ? 1 : 0;
    case FieldDescriptor::CPPTYPE_ENUM:
      // Negative numbers count by their wire representation, which is beyond every range.
      return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(value)));
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return value == kAnything ? 0 : value;  // is set to -1, which is below the range as well
    default:
      return value;
  }
}

void Set(Message* message, const FieldDescriptor* field, uint64_t value) {
  const auto* reflection = message->GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32: {
      const auto narrow = static_cast<uint32_t>(value);
      repeated ? reflection->SetRepeatedUInt32(message, field, 0, narrow)
               : reflection->SetUInt32(message, field, narrow);
      break;
    }
    case FieldDescriptor::CPPTYPE_UINT64:
      repeated ? reflection->SetRepeatedUInt64(message, field, 0, value)
               : reflection->SetUInt64(message, field, value);
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      reflection->SetEnumValue(message, field, static_cast<int>(value));
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      reflection->SetBool(message, field, value != 0);
      break;
    case FieldDescriptor::CPPTYPE_FLOAT: {
      const float number = value == kAnything ? -1 : static_cast<float>(value);
      repeated ? reflection->SetRepeatedFloat(message, field, 0, number)
               : reflection->SetFloat(message, field, number);
      break;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      reflection->SetDouble(message, field, value == kAnything ? -1 : static_cast<double>(value));
      break;
    default: {
      const std::string text(value, '<');
      repeated ? reflection->SetRepeatedString(message, field, 0, text)
               : reflection->SetString(message, field, text);
    }
  }
}

// The hostile values, and values at the rule's bounds.
std::set<uint64_t> ValuesFor(const FieldDescriptor* field) {
  std::set<uint64_t> values(std::begin(kHostile), std::end(kHostile));
  if (const auto rule = FieldRules().find(field->full_name()); rule != FieldRules().end()) {
    const FieldRule& r = rule->second;
    values.insert({r.low, r.high});
    if (r.low > 0) values.insert(r.low - 1);
    if (r.high < kAnything) values.insert(r.high + 1);
  }
  if (!IsText(field)) return values;
  std::set<uint64_t> lengths = {kLongestText};
  for (const uint64_t value : values) {
    if (value <= kLongestText) lengths.insert(value);
  }
  return lengths;
}

void Walk(Message* request, Message* node, std::set<std::string>* seen,
          const std::function<void(const Mutation&)>& use) {
  const Descriptor* descriptor = node->GetDescriptor();
  const auto* reflection = node->GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    const bool repeated = field->is_repeated();
    const bool may_be_unset = field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE &&
                              field->type() != FieldDescriptor::TYPE_BYTES;
    if (repeated ? reflection->FieldSize(*node, field) == 0
                 : !may_be_unset && !reflection->HasField(*node, field)) {
      continue;
    }
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Walk(request,
           repeated ? reflection->MutableRepeatedMessage(node, field, 0)
                    : reflection->MutableMessage(node, field),
           seen, use);
      continue;
    }
    seen->insert(field->full_name());
    const std::unique_ptr<Message> before(node->New());
    before->CopyFrom(*node);
    for (const uint64_t value : ValuesFor(field)) {
      Set(node, field, value);
      use({request, field->full_name(), Narrowed(field, value)});
      node->CopyFrom(*before);
    }
  }
}

void AddFields(const Descriptor* message, std::set<std::string>* fields) {
  for (int i = 0; i < message->field_count(); ++i) {
    const FieldDescriptor* field = message->field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      AddFields(field->message_type(), fields);
    } else {
      fields->insert(field->full_name());
    }
  }
}

std::map<std::string, FieldRule> SequenceRules() {
  const FieldRule any, lease{0, kMostLease, "lease_ms", {}};
  const FieldRule client{0, kMostName, "client_id", {}}, repeat{0, kMostName, "request_id", {}};
  return {
      {"OpenRequest.model_id", {1, kMostName, "model_id", {}}},
      {"OpenRequest.request_id", repeat},
      {"OpenRequest.client_id", client},
      {"OpenRequest.lease_ms", lease},
      {"Prefix.token_ids", any},
      {"Prefix.page_keys", {16, 32, "prefix.page_keys[0]", {}}},
      {"Prefix.salt", {0, kMostName, "prefix.salt", {}}},
      {"Prefix.max_rows", any},
      {"ProbeRequest.model_id", {1, kMostName, "model_id", {}}},
      {"MatchRequest.sequence_id", any},
      {"MatchRequest.expected_epoch", any},
      {"MatchRequest.first_row", {0, 0, "first_row", {}}},
      {"GetRequest.sequence_ids", any},
      {"GetRequest.client_id", client},
      {"GetRequest.all_tenants", {0, 1, "", {"sequence_ids"}}},
      {"GetRequest.most", {0, 4096, "most", {"sequence_ids"}}},
      {"GetRequest.after", {0, kAnything, "", {"sequence_ids"}}},
      {"ForkRequest.sequence_id", any},
      {"ForkRequest.expected_epoch", any},
      {"ForkRequest.length", {0, 0, "length", {}}},
      {"ForkRequest.request_id", repeat},
      {"ForkRequest.client_id", client},
      {"ForkRequest.lease_ms", lease},
      {"TruncateRequest.sequence_id", any},
      {"TruncateRequest.length", {0, 0, "length", {}}},
      {"TruncateRequest.expected_epoch", any},
      {"ReadTailRequest.sequence_id", any},
      {"ReadTailRequest.expected_epoch", any},
      {"ReadTailRequest.offset", any},  // its range: window_test
      {"ReleaseRequest.sequence_ids", any},
      {"RenewLeaseRequest.sequence_ids", any},
      {"RenewLeaseRequest.client_id", client},
      {"RenewLeaseRequest.lease_ms", lease},
  };
}

std::map<std::string, FieldRule> ModelRules() {
  const std::string geometry = "model.geometry.";
  return {
      {"ModelSpec.model_id", {1, kMostName, "model.model_id", {}}},
      {"Geometry.num_heads", {1, 16, geometry + "num_heads", {}}},
      {"Geometry.kv_lora_rank", {1, 120, geometry + "kv_lora_rank", {geometry + "rope_dim"}}},
      {"Geometry.rope_dim", {0, 96, geometry + "rope_dim", {}}},
      {"Geometry.nope_dim", {1, 64, geometry + "nope_dim", {geometry + "v_dim"}}},
      {"Geometry.v_dim", {1, 64, geometry + "v_dim", {}}},
      {"ModelSpec.layers", {1, 8, "model.layers", {"kv_scales"}}},
      {"ModelSpec.softmax_scale", {1, kAnything, "model.softmax_scale", {}}},
      {"ModelSpec.kv_dtype", {0, 1, "model.kv_dtype", {"model.kv_format"}}},
      {"ModelSpec.kv_format", {0, 4, "model.kv_format", {"model.kv_format", "kv_scales"}}},
      {"ModelSpec.fp8_compute", {0, 2, "model.fp8_compute", {"model.fp8_compute"}}},
      {"ModelSpec.attention", {0, 3, "model.attention", {"model.top_k", "model.window"}}},
      {"ModelSpec.top_k", {0, 0, "model.top_k", {}}},
      {"ModelSpec.index_heads", {0, 0, "model.index_heads", {}}},
      {"ModelSpec.index_dim", {0, 0, "model.index_dim", {}}},
      {"ModelSpec.weights_digest", {0, 32, "model.weights_digest", {"model.weights_digest"}}},
      {"ModelSpec.window", {0, 0, "model.window", {}}},
      {"ModelSpec.ratios", {0, kAnything, "model.ratios", {"model.ratios"}}},
      {"ModelSpec.entry_format", {0, 0, "model.entry_format", {}}},
      {"ModelSpec.tail_bytes", {0, 0, "model.tail_bytes", {}}},
      {"ModelSpec.needs_sinks", {0, 0, "model.needs_sinks", {}}},
      {"ModelSpec.rope_owner", {1, 2, "model.rope_owner", {"model.q_lora_rank"}}},
      {"ModelSpec.q_lora_rank", {0, 0, "model.q_lora_rank", {}}},
      {"ModelSpec.hidden_size", {0, 0, "model.hidden_size", {}}},
      {"ModelSpec.rope_layout", {0, 0, "model.rope_layout", {}}},
      {"ModelSpec.projected_dtype", {0, 0, "model.projected_dtype", {}}},
      {"ModelSpec.query_precision", {0, 2, "model.query_precision", {}}},
      {"ModelSpec.page_size", {0, 4096, "model.page_size", {}}},
      {"RegisterRequest.lease_ms", {0, kMostLease, "lease_ms", {}}},
      {"RegisterRequest.kv_scales", {1, kAnything, "kv_scales[0]", {}}},
      {"RegisterRequest.sinks", {1, kAnything, "sinks", {"sinks"}}},
      {"UploadScalesRequest.model_id", {1, kMostName, "model_id", {}}},
      {"UploadScalesRequest.scales", {1, kAnything, "scales[0]", {}}},
      {"UploadSinksRequest.model_id", {1, kMostName, "model_id", {}}},
      {"UploadSinksRequest.layer_begin", {0, 1, "layer_begin", {"layer_count"}}},
      {"UploadSinksRequest.layer_count", {0, 2, "layer_count", {"sinks"}}},
      {"UploadSinksRequest.head_begin", {0, 3, "head_begin", {"head_count"}}},
      {"UploadSinksRequest.head_count", {0, 4, "head_count", {"sinks"}}},
      {"UploadSinksRequest.sinks", {0, kAnything, "sinks[0]", {}}},
      {"UnregisterRequest.model_id", {1, kMostName, "model_id", {}}},
      {"GetQuotaRequest.tenant", {0, kMostName, "tenant", {}}},
      {"GetQuotaRequest.all", {0, 1, "", {"tenant"}}},
      {"SetQuotaRequest.tenant", {1, kMostName, "tenant", {}}},
      {"QuotaBound.resource", {1, 16, "bounds[0].resource", {}}},
      {"QuotaBound.bound", {0, kMostPosition, "bounds[0].bound", {}}},
      {"SetQuotaRequest.weight", {0, 1000, "weight", {}}},
      {"SetQuotaRequest.reset", {}},
      {"EvictSequencesRequest.tenant", {1, kMostName, "tenant", {}}},
      {"EvictSequencesRequest.sequence_ids", {}},
      {"EvictSequencesRequest.client_id", {0, kMostName, "client_id", {"sequence_ids"}}},
      {"EvictSequencesRequest.all", {0, 1, "", {"sequence_ids"}}},
      {"EvictSequencesRequest.attempt", {}},
      {"EvictModelRequest.tenant", {1, kMostName, "tenant", {}}},
      {"EvictModelRequest.model_id", {1, kMostName, "model_id", {}}},
      {"WatchStatusRequest.interval_ms", {}},
      {"DrainRequest.deadline_ms", {}},
      {"DrainRequest.exit", {}},
      {"DrainRequest.to", {0, kMostName, "to", {"to"}}},  // HOST:PORT
      {"DrainRequest.also_to", {1, kMostName, "also_to[0]", {"also_to[0]"}}},
  };
}

std::map<std::string, FieldRule> WeightRules() {
  const FieldRule any;
  return {
      {"UploadWeightsRequest.Header.model_id", {1, kMostName, "header.model_id", {}}},
      {"UploadWeightsRequest.Header.tenant", {0, kMostName, "header.tenant", {}}},
      {"UploadWeightsRequest.Header.kv_scales", any},  // only with a tenant: weights_test
      // As well: weight_parts_test.
      {"UploadWeightsRequest.Header.attempt", {0, 0, "header.attempt", {}}},
      {"UploadWeightsRequest.Header.is_part", {0, 0, "header.is_part", {"header.attempt"}}},
      {"UploadWeightsRequest.Header.sinks", any},
      {"UploadWeightsRequest.Chunk.layer", {0, 1, "chunk.layer", {}}},
      {"UploadWeightsRequest.Chunk.head_begin", {0, 3, "chunk.head_begin", {}}},
      {"UploadWeightsRequest.Chunk.head_count", {1, 4, "chunk.head_count", {"chunk.payload"}}},
      {"UploadWeightsRequest.Chunk.part", {0, 2, "chunk.part", {}}},
      {"UploadWeightsRequest.Chunk.dtype", {0, 1, "chunk.dtype", {}}},
      {"UploadWeightsRequest.Chunk.payload", {2048, 2048, "chunk.payload", {}}},
      {"UploadWeightsRequest.Trailer.sha256", {32, 32, "trailer.sha256", {}}},
      {"UploadWeightsRequest.Trailer.xxh3", any},  // only with an attempt: weight_parts_test
      {"UploadWeightsRequest.Trailer.parts", any},
  };
}

std::map<std::string, FieldRule> PageRules() {
  const FieldRule any;
  constexpr uint64_t kMostRows = 4096;
  return {
      {"ExportRequest.sequence_id", any},
      {"ExportRequest.expected_epoch", any},
      {"ExportRequest.first_row", {0, 0, "first_row", {}}},
      {"ExportRequest.end_row", {0, 2, "end_row", {}}},
      {"ImportTarget.model_id", {1, kMostName, "target.model_id", {}}},
      {"ImportTarget.sequence_id", any},
      {"ImportTarget.expected_epoch", any},
      {"ImportTarget.client_id", {0, kMostName, "target.client_id", {}}},
      {"ImportTarget.lease_ms", {0, kMostLease, "target.lease_ms", {}}},
      {"ImportTarget.tenant", {0, kMostName, "target.tenant", {}}},
      {"ImportTarget.new_sequence_id", {0, kAnything, "", {"target.tenant"}}},
      {"ImportTarget.attempt", {0, kAnything, "", {"target.tenant"}}},
      {"WatchEventsRequest.after", any},
      {"WatchEventsRequest.all_tenants", any},
      {"ExplainRequest.most", {0, 8192, "most", {}}},
      {"ExplainRequest.all_tenants", any},
      {"HintRequest.kind", {1, 4, "kind", {}}},
      {"HintRequest.sequence_id", {0, 0, "prefix", {}}},  // together with a prefix
      {"HintRequest.expected_epoch", any},
      {"HintRequest.model_id", {1, kMostName, "model_id", {}}},
      {"HintRequest.ttl_ms", {0, kMostLease, "ttl_ms", {}}},
      {"HintRequest.priority", {0, 3, "priority", {}}},
      {"CheckpointRequest.sequence_ids", any},
      {"RestoreRequest.sequence_ids", any},
      {"RestoreRequest.client_id", {0, kMostName, "client_id", {}}},
      {"RestoreRequest.lease_ms", {0, kMostLease, "lease_ms", {}}},
      {"DropCheckpointsRequest.sequence_ids", any},
      {"PagesHeader.version", {1, 1, "version", {}}},
      {"PagesHeader.kv_scales", any},
      {"PagesHeader.sinks", any},  // for models with a window: page_stream_test
      {"PagesHeader.fp8_kind", {1, 2, "fp8_kind", {}}},
      {"PagesHeader.group_bytes", {1, uint64_t{1} << 40, "group_bytes", {}}},
      {"PagesHeader.first_row", {0, kMostRows, "first_row", {}}},
      {"PagesHeader.rows", {1, kMostRows, "rows", {"part.group"}}},
      {"PagesHeader.tail_position", {1, 0, "tail_position", {}}},  // 0 for a model without tails
      {"PageGroup.first_row", {0, 0, "part.group", {}}},
      {"PageGroup.rows", {2, 2, "part.group", {}}},
      {"PageGroup.content", {0, 0, "part.group", {}}},
      {"PageChunk.payload", {320, 320, "part.chunk.payload", {}}},  // 2 layers x 2 rows x 80
      {"PageGroupEnd.sha256", any},
      {"PagesTrailer.groups", {1, 1, "part.trailer.groups", {}}},
      {"PagesTrailer.sha256", any},
  };
}

std::map<std::string, FieldRule> StreamRules() {
  const FieldRule any;
  const std::set<std::string> size = {"payload", "shared.in_length"};
  const std::string sequence = "begin_step.sequences[0].";
  return {
      {"AttendStreamRequest.tag", any},
      {"AttendStreamRequest.payload", {800, 800, "payload", {}}},
      {"SharedTensors.handle", any},
      {"SharedTensors.in_offset", {0, 0, "shared.in_offset", {}}},
      {"SharedTensors.in_length", {832, 832, "shared.in_length", {}}},
      {"SharedTensors.out_offset", {0, 64960, "shared.out_offset", {"shared.out_offset"}}},
      {"SharedTensors.out_length", {544, 544, "shared.out_length", {}}},
      {"BeginStep.step_id", any},
      {"BeginStep.model_id", {1, kMostName, "begin_step.model_id", {}}},
      {"BeginStep.participants", {0, 4, "begin_step.participants", {}}},
      {"BeginStep.lease_ms", {0, kMostStepLease, "begin_step.lease_ms", {}}},
      {"BeginStep.rotations", {0, 0, "begin_step.rotations", {}}},
      {"BeginStep.traceparent", any},  // anything but a header is ignored
      {"StepSequence.sequence_id", any},
      {"StepSequence.epoch", any},
      {"StepSequence.start_position", {0, 4096, sequence + "start_position", {}}},
      {"StepSequence.rows", {1, 1024, sequence + "rows", {}}},
      {"Attend.step_id", any},
      {"Attend.layer", {0, 1, "attend.layer", {}}},
      {"Attend.row_begin", {0, 1, "attend.row_begin", {"attend.row_count"}}},
      {"Attend.row_count", {1, 2, "attend.row_count", size}},
      {"Attend.head_offset", {0, 3, "attend.head_offset", {"attend.num_heads"}}},
      {"Attend.num_heads", {1, 4, "attend.num_heads", size}},
      {"Attend.profile", {1, 4, "attend.profile", {"payload", "attend.want_lse"}}},
      {"Attend.has_kv", {0, 1, "", size}},
      {"Attend.want_lse", {0, 1, "", {"shared.out_length"}}},
      {"Attend.q_dtype", {0, 3, "attend.q_dtype", size}},
      {"Attend.kv_row_dtype", {0, 3, "attend.kv_row_dtype", size}},
      {"Attend.o_dtype", {0, 2, "attend.o_dtype", {"shared.out_length"}}},
      {"Attend.timeout_us", any},
      {"Attend.lists", {0, 0, "attend.lists", {}}},
      {"Attend.list_entries", {0, 0, "attend.list_entries", {}}},
      {"Attend.want_lists", {0, 0, "attend.want_lists", {}}},
      {"EndStep.step_id", any},
      {"EndStep.committed_rows", {0, 2, "end_step.committed_rows[0]", {}}},
      {"EndStep.tails", {0, 0, "end_step.tails[0]", {"end_step.tails"}}},
      {"AbortStep.step_id", any},
  };
}

}  // namespace

const std::map<std::string, FieldRule>& FieldRules() {
  static const std::map<std::string, FieldRule> rules = [] {
    std::map<std::string, FieldRule> all;
    for (const auto& part :
         {SequenceRules(), ModelRules(), WeightRules(), PageRules(), StreamRules()}) {
      for (const auto& [name, rule] : part) all.emplace("mla.v1." + name, rule);
    }
    return all;
  }();
  return rules;
}

std::set<std::string> RequestFields() {
  std::set<std::string> fields;
  for (const Descriptor* message :
       {v1::GetStatsRequest::descriptor(), v1::AttendStreamRequest::descriptor(),
        v1::ListModelsRequest::descriptor(), v1::OpenRequest::descriptor(),
        v1::ExportRequest::descriptor()}) {
    const google::protobuf::FileDescriptor* file = message->file();
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        AddFields(file->service(s)->method(m)->input_type(), &fields);
      }
    }
  }
  return fields;
}

std::string Mutation::ToString() const { return absl::StrCat(field, " = ", value); }

void ForEachMutation(Message* request, std::set<std::string>* seen,
                     const std::function<void(const Mutation&)>& use) {
  Walk(request, request, seen, use);
}

}  // namespace mla::integration
