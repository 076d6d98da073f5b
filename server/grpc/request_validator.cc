#include "server/grpc/request_validator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

using kernels::DType;
using scheduler::Limits;
using scheduler::ModelSpec;
using scheduler::Profile;

constexpr uint64_t kMaxInt64 = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

std::string Range(int64_t low, int64_t high) { return absl::StrCat(low, "..", high); }

// Checks low <= value <= high before narrowing.
absl::Status Narrow(uint64_t value, int64_t low, int64_t high, const char* field, int32_t* out) {
  absl::Status status = CheckRange(field, value, low, high);
  if (status.ok()) *out = static_cast<int32_t>(value);
  return status;
}

absl::Status Narrow64(uint64_t value, const char* field, int64_t* out) {
  absl::Status status = CheckRange(field, value, 0, std::numeric_limits<int64_t>::max());
  if (status.ok()) *out = static_cast<int64_t>(value);
  return status;
}

absl::Status CheckLease(uint32_t lease_ms, int64_t longest_ms, const char* field, int64_t* out) {
  absl::Status status = CheckRange(field, lease_ms, 0, longest_ms);
  if (status.ok()) *out = lease_ms;
  return status;
}

absl::Status CheckWireDType(v1::DType value, const char* field, DType* out) {
  switch (value) {
    case v1::DTYPE_UNSPECIFIED:
    case v1::DTYPE_BF16:
      *out = DType::kBf16;
      return absl::OkStatus();
    case v1::DTYPE_F32:
      *out = DType::kF32;
      return absl::OkStatus();
    default:
      return RefuseField(field, absl::StrCat(static_cast<int>(value)), "DTYPE_BF16 or DTYPE_F32",
                         "unknown_value");
  }
}

absl::Status CheckProfile(const v1::Attend& message, const ModelSpec& model, Profile* out) {
  switch (message.profile()) {
    case v1::PROFILE_ABSORBED:
      *out = Profile::kAbsorbed;
      return absl::OkStatus();
    case v1::PROFILE_APPEND_ONLY:
      *out = Profile::kAppendOnly;
      if (!message.has_kv()) {
        return RefuseField("attend.has_kv", "false", "true with PROFILE_APPEND_ONLY");
      }
      if (message.want_lse()) {
        return RefuseField("attend.want_lse", "true", "false with PROFILE_APPEND_ONLY");
      }
      return absl::OkStatus();
    case v1::PROFILE_EXPANDED:
      *out = Profile::kExpanded;
      if (model.geometry.nope_dim == 0 || model.geometry.v_dim == 0) {
        return MakeError(
            absl::StatusCode::kFailedPrecondition,
            "attend.profile: the model was registered without nope_dim and v_dim, so it has no "
            "EXPANDED form",
            {.field = "attend.profile",
             .got = "PROFILE_EXPANDED",
             .limit = "PROFILE_ABSORBED or PROFILE_APPEND_ONLY for this model",
             .reason = "no_expanded_profile"});
      }
      return absl::OkStatus();
    default:
      return RefuseField("attend.profile", absl::StrCat(static_cast<int>(message.profile())),
                         "PROFILE_ABSORBED, PROFILE_EXPANDED or PROFILE_APPEND_ONLY",
                         "unknown_value");
  }
}

// first < total and first + count <= total, in 64 bits. REQUIRES: total >= 1.
absl::Status CheckSlice(uint64_t first, uint64_t count, int64_t min_count, int64_t total,
                        const char* first_field, const char* count_field) {
  const absl::Status status = CheckRange(first_field, first, 0, total - 1);
  if (!status.ok()) return status;
  return CheckRange(count_field, count, min_count, total - static_cast<int64_t>(first));
}

// rows x heads x dim x element_size; false on overflow.
bool Product(int64_t a, int64_t b, int64_t c, int64_t d, int64_t* out) {
  return !__builtin_mul_overflow(a, b, out) && !__builtin_mul_overflow(*out, c, out) &&
         !__builtin_mul_overflow(*out, d, out);
}

absl::Status CheckSizes(const scheduler::AttendArgs& args, const ModelSpec& model,
                        int64_t payload_bytes, int64_t message_bytes, AttendSizes* sizes) {
  const auto q_element = static_cast<int64_t>(kernels::ElementSize(args.q_dtype));
  const auto o_element = static_cast<int64_t>(kernels::ElementSize(args.o_dtype));
  *sizes = {};
  bool fits = true;
  if (args.has_kv) {
    fits &= Product(args.row_count, 1, model.geometry.kv_row_dim(), q_element, &sizes->kv_bytes);
  }
  if (args.profile != Profile::kAppendOnly) {
    fits &= Product(args.row_count, args.num_heads, model.q_dim(args.profile), q_element,
                    &sizes->q_bytes);
    fits &= Product(args.row_count, args.num_heads, model.o_dim(args.profile), o_element,
                    &sizes->o_bytes);
  }
  if (args.want_lse) {
    fits &= Product(args.row_count, args.num_heads, 1, int64_t{sizeof(float)}, &sizes->lse_bytes);
  }
  int64_t in = 0, out = 0;
  fits = fits && !__builtin_add_overflow(sizes->kv_bytes, sizes->q_bytes, &in) &&
         !__builtin_add_overflow(sizes->o_bytes, sizes->lse_bytes, &out);
  if (!fits || out > message_bytes - kReplyHeaderBytes) {
    return RefuseField("attend.row_count", absl::StrCat(args.row_count),
                       absl::StrCat("so few that the reply's tensors stay within ",
                                    message_bytes - kReplyHeaderBytes, " bytes"),
                       "reply_too_large");
  }
  if (payload_bytes != kTensorsElsewhere && in != payload_bytes) {
    return RefuseField(
        "payload", absl::StrCat(payload_bytes, " bytes"),
        absl::StrCat(in, " bytes (kv ", sizes->kv_bytes, ", q ", sizes->q_bytes, ")"),
        "payload_size");
  }
  return absl::OkStatus();
}

absl::Status CheckIds(int count, const Limits& limits) {
  // A request may name every sequence there can be, and some that are gone.
  const int64_t most = int64_t{limits.max_sequences} * 2;
  if (count > most) {
    return RefuseField("sequence_ids", absl::StrCat(count),
                       absl::StrCat("at most ", most, " entries"));
  }
  return absl::OkStatus();
}

}  // namespace

#define MLA_RETURN_IF_ERROR(expression)                                     \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

absl::Status CheckName(const std::string& name, std::string_view field, bool optional,
                       const Limits& limits) {
  const size_t least = optional ? 0 : 1;
  if (name.size() < least || name.size() > static_cast<size_t>(limits.max_name_bytes)) {
    return RefuseField(std::string(field), absl::StrCat(name.size(), " bytes"),
                       absl::StrCat(least, "..", limits.max_name_bytes, " bytes"), "name_length");
  }
  if (std::any_of(name.begin(), name.end(),
                  [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; })) {
    return RefuseField(std::string(field), "a control character", "without control characters",
                       "name_characters");
  }
  return absl::OkStatus();
}

size_t MostHeaderBytes(const Limits& limits) {
  constexpr size_t kSequence = 64;  // a StepSequence has 41 bytes at most, a count of rows 10
  constexpr size_t kRest = 4096;    // numbers, a region's handle, fields of later clients
  return kRest + static_cast<size_t>(limits.max_name_bytes) +
         kSequence * static_cast<size_t>(limits.max_step_sequences);
}

absl::Status ParseBeginStep(const v1::BeginStep& message, const Limits& limits,
                            scheduler::BeginStepArgs* args, int32_t* total_rows) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "begin_step.model_id", false, limits));
  const int count = message.sequences_size();
  if (count < 1 || count > limits.max_step_sequences) {
    return RefuseField("begin_step.sequences", absl::StrCat(count),
                       absl::StrCat(Range(1, limits.max_step_sequences), " entries"));
  }
  int32_t participants = 0;
  MLA_RETURN_IF_ERROR(Narrow(message.participants(), 0, limits.max_participants,
                             "begin_step.participants", &participants));
  MLA_RETURN_IF_ERROR(CheckLease(message.lease_ms(), limits.longest_step_lease_ms(),
                                 "begin_step.lease_ms", &args->lease_ms));
  args->model_id = message.model_id();
  args->participants = std::max(participants, 1);
  args->sequences.resize(static_cast<size_t>(count));
  int64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    const v1::StepSequence& from = message.sequences(i);
    scheduler::StepSequenceArgs& to = args->sequences[static_cast<size_t>(i)];
    to.id = from.sequence_id();
    to.epoch = from.epoch();
    if (from.start_position() > kMaxInt64) {
      return RefuseField(absl::StrCat("begin_step.sequences[", i, "].start_position"),
                         absl::StrCat(from.start_position()), Range(0, limits.max_sequence_rows));
    }
    to.start_position = static_cast<int64_t>(from.start_position());
    MLA_RETURN_IF_ERROR(
        CheckRange([i] { return absl::StrCat("begin_step.sequences[", i, "].rows"); }, from.rows(),
                   1, limits.max_step_rows));
    to.rows = static_cast<int32_t>(from.rows());
    rows += to.rows;
  }
  if (rows > limits.max_step_rows) {
    return RefuseField("begin_step.sequences", absl::StrCat(rows),
                       absl::StrCat("at most ", limits.max_step_rows, " rows together"));
  }
  *total_rows = static_cast<int32_t>(rows);
  return absl::OkStatus();
}

absl::Status ParseAttend(const v1::Attend& message, const ModelSpec& model, int32_t total_rows,
                         int64_t payload_bytes, int64_t message_bytes, scheduler::AttendArgs* args,
                         AttendSizes* sizes) {
  *args = {};
  MLA_RETURN_IF_ERROR(Narrow(message.layer(), 0, model.layers - 1, "attend.layer", &args->layer));
  MLA_RETURN_IF_ERROR(CheckProfile(message, model, &args->profile));
  MLA_RETURN_IF_ERROR(CheckSlice(message.row_begin(), message.row_count(), 1, total_rows,
                                 "attend.row_begin", "attend.row_count"));
  const uint64_t least_heads = args->profile == Profile::kAppendOnly ? 0 : 1;
  MLA_RETURN_IF_ERROR(CheckSlice(message.head_offset(), message.num_heads(), least_heads,
                                 model.geometry.num_heads, "attend.head_offset",
                                 "attend.num_heads"));
  MLA_RETURN_IF_ERROR(CheckWireDType(message.q_dtype(), "attend.q_dtype", &args->q_dtype));
  MLA_RETURN_IF_ERROR(CheckWireDType(message.o_dtype(), "attend.o_dtype", &args->o_dtype));
  args->row_begin = static_cast<int32_t>(message.row_begin());
  args->row_count = static_cast<int32_t>(message.row_count());
  args->head_offset = static_cast<int32_t>(message.head_offset());
  args->num_heads = static_cast<int32_t>(message.num_heads());
  args->has_kv = message.has_kv();
  args->want_lse = message.want_lse();
  args->timeout_us = message.timeout_us();
  args->sized_for = model.geometry;
  return CheckSizes(*args, model, payload_bytes, message_bytes, sizes);
}

absl::Status ParseEndStep(const v1::EndStep& message, const Limits& limits,
                          scheduler::EndStepArgs* args) {
  const int count = message.committed_rows_size();
  if (count > limits.max_step_sequences) {
    return RefuseField("end_step.committed_rows", absl::StrCat(count),
                       absl::StrCat("at most ", limits.max_step_sequences, " entries"));
  }
  args->committed_rows.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const uint32_t rows = message.committed_rows(i);
    if (rows > static_cast<uint32_t>(limits.max_step_rows)) {
      return RefuseField(absl::StrCat("end_step.committed_rows[", i, "]"), absl::StrCat(rows),
                         Range(0, limits.max_step_rows));
    }
    args->committed_rows[static_cast<size_t>(i)] = static_cast<int32_t>(rows);
  }
  return absl::OkStatus();
}

namespace {

// After kv_dtype, which is unspecified or bf16 here.
absl::Status ParseKvFormat(const v1::ModelSpec& message, ModelSpec* spec) {
  const v1::KvFormat format = message.kv_format();
  if (!v1::KvFormat_IsValid(format)) {
    return RefuseField("model.kv_format", absl::StrCat(static_cast<int>(format)),
                       "a KvFormat of this version", "unknown_value");
  }
  if (format > v1::KV_FORMAT_BF16 && message.kv_dtype() != v1::DTYPE_UNSPECIFIED) {
    return RefuseField("model.kv_format", v1::KvFormat_Name(format),
                       "KV_FORMAT_BF16 with kv_dtype DTYPE_BF16", "conflict");
  }
  spec->kv_format = static_cast<kernels::KvFormat>(std::max(format, v1::KV_FORMAT_BF16));
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseModelSpec(const v1::ModelSpec& message, const Limits& limits, ModelSpec* spec) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "model.model_id", false, limits));
  const v1::Geometry& from = message.geometry();
  kernels::Geometry& to = spec->geometry;
  const int32_t max_dim = limits.max_row_dim;
  MLA_RETURN_IF_ERROR(
      Narrow(from.num_heads(), 1, limits.max_heads, "model.geometry.num_heads", &to.num_heads));
  MLA_RETURN_IF_ERROR(
      Narrow(from.kv_lora_rank(), 1, max_dim, "model.geometry.kv_lora_rank", &to.kv_lora_rank));
  MLA_RETURN_IF_ERROR(Narrow(from.rope_dim(), 0, max_dim - to.kv_lora_rank,
                             "model.geometry.rope_dim", &to.rope_dim));
  MLA_RETURN_IF_ERROR(
      Narrow(from.nope_dim(), 0, limits.max_v_dim, "model.geometry.nope_dim", &to.nope_dim));
  MLA_RETURN_IF_ERROR(Narrow(from.v_dim(), 0, limits.max_v_dim, "model.geometry.v_dim", &to.v_dim));
  if ((to.nope_dim == 0) != (to.v_dim == 0)) {
    return RefuseField("model.geometry.v_dim",
                       absl::StrCat(to.v_dim, " with nope_dim ", to.nope_dim),
                       "0 exactly when nope_dim is 0");
  }
  MLA_RETURN_IF_ERROR(
      Narrow(message.layers(), 1, limits.max_layers, "model.layers", &spec->layers));
  // Kernels compute with it in fp32, and some take denormals as zero.
  constexpr double kLeast = std::numeric_limits<float>::min();
  constexpr double kMost = std::numeric_limits<float>::max();
  if (!(message.softmax_scale() >= kLeast && message.softmax_scale() <= kMost)) {
    return RefuseField("model.softmax_scale", absl::StrCat(message.softmax_scale()),
                       absl::StrCat(kLeast, "..", kMost, ": it is never defaulted"));
  }
  if (message.kv_dtype() != v1::DTYPE_UNSPECIFIED && message.kv_dtype() != v1::DTYPE_BF16) {
    return RefuseField("model.kv_dtype", absl::StrCat(static_cast<int>(message.kv_dtype())),
                       "DTYPE_BF16", "unknown_value");
  }
  MLA_RETURN_IF_ERROR(ParseKvFormat(message, spec));
  if (message.rope_owner() != v1::ROPE_OWNER_WORKER) {
    return RefuseField("model.rope_owner", absl::StrCat(static_cast<int>(message.rope_owner())),
                       "ROPE_OWNER_WORKER: q and k arrive rotated", "unknown_value");
  }
  MLA_RETURN_IF_ERROR(Narrow(message.page_size(), 0, 4096, "model.page_size", &spec->page_size));
  spec->id = message.model_id();
  spec->softmax_scale = message.softmax_scale();
  switch (message.query_precision()) {
    case v1::QUERY_PRECISION_UNSPECIFIED:
      spec->query_precision = scheduler::QueryPrecision::kDefault;
      break;
    case v1::QUERY_PRECISION_BF16:
      spec->query_precision = scheduler::QueryPrecision::kBf16;
      break;
    case v1::QUERY_PRECISION_SPLIT:
      spec->query_precision = scheduler::QueryPrecision::kSplit;
      break;
    default:
      return RefuseField("model.query_precision",
                         absl::StrCat(static_cast<int>(message.query_precision())),
                         "QUERY_PRECISION_BF16 or QUERY_PRECISION_SPLIT", "unknown_value");
  }
  return absl::OkStatus();
}

namespace {

kernels::Bf16 WeightAt(const std::string& payload, int64_t index) {
  kernels::Bf16 value;
  std::memcpy(&value, payload.data() + index * int64_t{sizeof(value)}, sizeof(value));
  return value;
}

bool IsWeight(kernels::Bf16 value) {
  return (value & 0x7fffu) < (std::bit_cast<uint32_t>(kernels::kWeightBound) >> 16);
}

// REQUIRES: the payload has its size.
absl::Status CheckWeights(const v1::UploadWeightsRequest::Chunk& message,
                          const kernels::Geometry& g) {
  const std::string& payload = message.payload();
  const auto count = static_cast<int64_t>(payload.size() / sizeof(kernels::Bf16));
  constexpr int64_t kBlock = 4096;  // looked at as a whole, which compilers make a vector of
  int64_t at = 0;
  for (; at < count; at += kBlock) {
    bool good = true;
    const int64_t end = std::min(count, at + kBlock);
    for (int64_t i = at; i < end; ++i) good &= IsWeight(WeightAt(payload, i));
    if (!good) break;
  }
  while (at < count && IsWeight(WeightAt(payload, at))) ++at;
  if (at >= count) return absl::OkStatus();
  const int64_t uk_head = int64_t{g.nope_dim} * g.kv_lora_rank;
  const int64_t uv_head = int64_t{g.kv_lora_rank} * g.v_dim;
  const int64_t uk = uk_head * message.head_count();
  const bool in_uk = at < uk;
  const int64_t inside = in_uk ? at : at - uk;
  const int64_t head = message.head_begin() + inside / (in_uk ? uk_head : uv_head);
  const int64_t element = inside % (in_uk ? uk_head : uv_head);
  const int64_t columns = in_uk ? g.kv_lora_rank : g.v_dim;
  return RefuseField("chunk.payload",
                     absl::StrCat(kernels::ToFloat(WeightAt(payload, at)), " at layer ",
                                  message.layer(), ", head ", head, ", ", in_uk ? "W_UK[" : "W_UV[",
                                  element / columns, ", ", element % columns, "]"),
                     "finite weights of magnitude below 2^20", "not_finite");
}

}  // namespace

absl::Status ParseWeightsChunk(const v1::UploadWeightsRequest::Chunk& message,
                               const ModelSpec& model, int64_t* bytes) {
  int32_t layer = 0;
  MLA_RETURN_IF_ERROR(Narrow(message.layer(), 0, model.layers - 1, "chunk.layer", &layer));
  MLA_RETURN_IF_ERROR(CheckSlice(message.head_begin(), message.head_count(), 1,
                                 model.geometry.num_heads, "chunk.head_begin", "chunk.head_count"));
  const kernels::Geometry& g = model.geometry;
  if (!Product(message.head_count(), g.kv_lora_rank, g.nope_dim + g.v_dim,
               int64_t{sizeof(kernels::Bf16)}, bytes) ||
      *bytes != static_cast<int64_t>(message.payload().size())) {
    return RefuseField("chunk.payload", absl::StrCat(message.payload().size(), " bytes"),
                       absl::StrCat(*bytes, " bytes"), "payload_size");
  }
  return CheckWeights(message, g);
}

absl::Status ParseOpen(const v1::OpenRequest& message, const Limits& limits,
                       scheduler::OpenArgs* args) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "model_id", false, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.request_id(), "request_id", true, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  args->model_id = message.model_id();
  args->request_id = message.request_id();
  args->client_id = message.client_id();
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", &args->lease_ms);
}

absl::Status ParseFork(const v1::ForkRequest& message, const Limits& limits,
                       scheduler::ForkArgs* args) {
  MLA_RETURN_IF_ERROR(CheckName(message.request_id(), "request_id", true, limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  args->parent = message.sequence_id();
  args->expected_epoch = message.expected_epoch();
  if (message.has_length()) {
    int64_t length = 0;
    MLA_RETURN_IF_ERROR(Narrow64(message.length(), "length", &length));
    args->length = length;
  }
  args->request_id = message.request_id();
  args->client_id = message.client_id();
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", &args->lease_ms);
}

absl::Status ParseTruncate(const v1::TruncateRequest& message, int64_t* length) {
  return Narrow64(message.length(), "length", length);
}

absl::Status ParseGet(const v1::GetRequest& message, const Limits& limits,
                      scheduler::SequenceSelection* selection) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  selection->ids.assign(message.sequence_ids().begin(), message.sequence_ids().end());
  selection->client_id = message.client_id();
  return absl::OkStatus();
}

absl::Status ParseRenew(const v1::RenewLeaseRequest& message, const Limits& limits,
                        scheduler::SequenceSelection* selection, int64_t* lease_ms) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  MLA_RETURN_IF_ERROR(CheckName(message.client_id(), "client_id", true, limits));
  if (message.sequence_ids_size() == 0 && message.client_id().empty()) {
    return RefuseField("sequence_ids", "neither", "sequence ids, or a client_id", "missing");
  }
  selection->ids.assign(message.sequence_ids().begin(), message.sequence_ids().end());
  selection->client_id = message.client_id();
  return CheckLease(message.lease_ms(), limits.max_lease_ms, "lease_ms", lease_ms);
}

absl::Status ParseRelease(const v1::ReleaseRequest& message, const Limits& limits,
                          std::vector<scheduler::SequenceId>* ids) {
  MLA_RETURN_IF_ERROR(CheckIds(message.sequence_ids_size(), limits));
  ids->assign(message.sequence_ids().begin(), message.sequence_ids().end());
  return absl::OkStatus();
}

#undef MLA_RETURN_IF_ERROR

}  // namespace mla::server
