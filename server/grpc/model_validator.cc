// Implements the part of request_validator.h for models.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/field_checks.h"
#include "server/grpc/request_validator.h"

namespace mla::server {

using scheduler::Limits;
using scheduler::ModelSpec;

namespace {

// Call it after the check of kv_dtype, which is unspecified or bf16 here.
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

// Counts and ratios are checked later, with the model's page size
// (scheduler/tables/model_checks.h).
absl::Status ParseWindow(const v1::ModelSpec& message, bool windowed, ModelSpec* spec) {
  MLA_RETURN_IF_ERROR(Narrow(message.window(), windowed ? 1 : 0, windowed ? kernels::kMaxWindow : 0,
                             "model.window", &spec->window));
  if (message.ratios_size() != (windowed ? spec->layers : 0)) {
    return RefuseField("model.ratios", absl::StrCat(message.ratios_size(), " entries"),
                       windowed ? "one a layer" : "none: the attention has no window",
                       "wrong_count");
  }
  for (int i = 0; i < message.ratios_size(); ++i) {
    MLA_RETURN_IF_ERROR(CheckRange([i] { return absl::StrCat("model.ratios[", i, "]"); },
                                   message.ratios(i), 0, 4096));
    spec->ratios.push_back(static_cast<int32_t>(message.ratios(i)));
  }
  const v1::KvFormat format = message.entry_format();
  if (!v1::KvFormat_IsValid(format) || (!windowed && format != v1::KV_FORMAT_UNSPECIFIED)) {
    return RefuseField("model.entry_format", absl::StrCat(static_cast<int>(format)),
                       windowed ? "a KvFormat of this version" : "0 without a window",
                       "unknown_value");
  }
  const bool as_rows = format == v1::KV_FORMAT_UNSPECIFIED;
  if (!windowed) return absl::OkStatus();
  spec->entry_format = as_rows ? spec->kv_format : static_cast<kernels::KvFormat>(format);
  return absl::OkStatus();
}

// REQUIRES: geometry, layers and format of `spec` have been checked.
absl::Status ParseAttention(const v1::ModelSpec& message, const Limits& limits, ModelSpec* spec) {
  if (!v1::AttentionKind_IsValid(message.attention())) {
    return RefuseField("model.attention", absl::StrCat(static_cast<int>(message.attention())),
                       "an AttentionKind of this version", "unknown_value");
  }
  const bool sparse = message.attention() == v1::ATTENTION_KIND_SPARSE_V32;
  const bool windowed = message.attention() == v1::ATTENTION_KIND_SPARSE_V4;
  if (sparse) spec->attention = kernels::AttentionKind::kSparse;
  if (windowed) spec->attention = kernels::AttentionKind::kWindow;
  MLA_RETURN_IF_ERROR(Narrow(message.top_k(), sparse ? 1 : 0,
                             sparse || windowed ? limits.max_top_k : 0, "model.top_k",
                             &spec->top_k));
  MLA_RETURN_IF_ERROR(Narrow(message.tail_bytes(), 0, windowed ? limits.max_tail_bytes : 0,
                             "model.tail_bytes", &spec->tail_bytes));
  MLA_RETURN_IF_ERROR(
      CheckRange("model.needs_sinks", message.needs_sinks() ? 1 : 0, 0, windowed ? 1 : 0));
  spec->needs_sinks = message.needs_sinks();
  MLA_RETURN_IF_ERROR(ParseWindow(message, windowed, spec));
  kernels::IndexerShape& indexer = spec->indexer;
  MLA_RETURN_IF_ERROR(Narrow(message.index_heads(), 0, sparse ? kernels::kMaxIndexHeads : 0,
                             "model.index_heads", &indexer.heads));
  return Narrow(message.index_dim(), indexer.heads > 0 ? 1 : 0,
                indexer.heads > 0 ? kernels::kMaxIndexDim : 0, "model.index_dim", &indexer.dim);
}

// REQUIRES: the geometry of `spec` has been checked.
absl::Status ParseProjected(const v1::ModelSpec& message, const Limits& limits, ModelSpec* spec) {
  const v1::RopeOwner owner = message.rope_owner();
  if (owner != v1::ROPE_OWNER_WORKER && owner != v1::ROPE_OWNER_SERVER) {
    return RefuseField("model.rope_owner", absl::StrCat(static_cast<int>(owner)),
                       "ROPE_OWNER_WORKER: q and k arrive rotated, or ROPE_OWNER_SERVER",
                       "unknown_value");
  }
  const bool projected = owner == v1::ROPE_OWNER_SERVER;
  const int32_t least = projected ? 1 : 0, largest = projected ? limits.max_hidden_size : 0;
  MLA_RETURN_IF_ERROR(Narrow(message.q_lora_rank(), least, largest, "model.q_lora_rank",
                             &spec->projected.q_lora_rank));
  MLA_RETURN_IF_ERROR(Narrow(message.hidden_size(), least, largest, "model.hidden_size",
                             &spec->projected.hidden_size));
  const auto layout = static_cast<int>(message.rope_layout());
  if (!v1::RopeLayout_IsValid(layout) || projected != (layout != v1::ROPE_LAYOUT_UNSPECIFIED)) {
    return RefuseField(
        "model.rope_layout", absl::StrCat(layout),
        projected ? "ROPE_LAYOUT_INTERLEAVED or ROPE_LAYOUT_HALVES" : "0 with ROPE_OWNER_WORKER",
        "unknown_value");
  }
  spec->rope = static_cast<kernels::RopeLayout>(layout);
  const v1::DType held = message.projected_dtype();
  const bool codes = projected && held == v1::DTYPE_F8_E4M3;
  if (!codes && held != v1::DTYPE_UNSPECIFIED && !(projected && held == v1::DTYPE_BF16)) {
    return RefuseField("model.projected_dtype", absl::StrCat(static_cast<int>(held)),
                       projected ? "0, DTYPE_BF16 or DTYPE_F8_E4M3" : "0 with ROPE_OWNER_WORKER",
                       "unknown_value");
  }
  if (codes) spec->projected.weights = kernels::DType::kFp8E4m3;
  return absl::OkStatus();
}

absl::Status ParseFp8Compute(const v1::ModelSpec& message, ModelSpec* spec) {
  if (!v1::Fp8Compute_IsValid(message.fp8_compute())) {
    return RefuseField("model.fp8_compute", absl::StrCat(static_cast<int>(message.fp8_compute())),
                       "an Fp8Compute of this version", "unknown_value");
  }
  switch (message.fp8_compute()) {
    case v1::FP8_COMPUTE_OFF:
      spec->fp8_compute = scheduler::Fp8Compute::kOff;
      break;
    case v1::FP8_COMPUTE_ON:
      spec->fp8_compute = scheduler::Fp8Compute::kOn;
      break;
    default:
      spec->fp8_compute = scheduler::Fp8Compute::kAuto;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseModelSpec(const v1::ModelSpec& message, const Limits& limits, ModelSpec* spec) {
  MLA_RETURN_IF_ERROR(CheckName(message.model_id(), "model.model_id", false, limits));
  const v1::Geometry& from = message.geometry();
  kernels::Geometry& geometry = spec->geometry;
  const int32_t max_dim = limits.max_row_dim;
  MLA_RETURN_IF_ERROR(Narrow(from.num_heads(), 1, limits.max_heads, "model.geometry.num_heads",
                             &geometry.num_heads));
  MLA_RETURN_IF_ERROR(Narrow(from.kv_lora_rank(), 1, max_dim, "model.geometry.kv_lora_rank",
                             &geometry.kv_lora_rank));
  MLA_RETURN_IF_ERROR(Narrow(from.rope_dim(), 0, max_dim - geometry.kv_lora_rank,
                             "model.geometry.rope_dim", &geometry.rope_dim));
  MLA_RETURN_IF_ERROR(
      Narrow(from.nope_dim(), 0, limits.max_v_dim, "model.geometry.nope_dim", &geometry.nope_dim));
  MLA_RETURN_IF_ERROR(
      Narrow(from.v_dim(), 0, limits.max_v_dim, "model.geometry.v_dim", &geometry.v_dim));
  if ((geometry.nope_dim == 0) != (geometry.v_dim == 0)) {
    return RefuseField("model.geometry.v_dim",
                       absl::StrCat(geometry.v_dim, " with nope_dim ", geometry.nope_dim),
                       "0 exactly when nope_dim is 0");
  }
  MLA_RETURN_IF_ERROR(
      Narrow(message.layers(), 1, limits.max_layers, "model.layers", &spec->layers));
  // Kernels compute with the scale in fp32, and some treat denormals as zero.
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
  MLA_RETURN_IF_ERROR(ParseFp8Compute(message, spec));
  MLA_RETURN_IF_ERROR(ParseProjected(message, limits, spec));
  MLA_RETURN_IF_ERROR(Narrow(message.page_size(), 0, 4096, "model.page_size", &spec->page_size));
  MLA_RETURN_IF_ERROR(ParseAttention(message, limits, spec));
  const size_t digest = message.weights_digest().size();
  if (digest != 0 && digest != scheduler::kWeightsDigestBytes) {
    return RefuseField("model.weights_digest", absl::StrCat(digest, " bytes"),
                       absl::StrCat(scheduler::kWeightsDigestBytes, " bytes, or none"));
  }
  spec->weights_digest = message.weights_digest();
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

static_assert(static_cast<int>(kernels::RopeLayout::kInterleaved) == v1::ROPE_LAYOUT_INTERLEAVED);
static_assert(static_cast<int>(kernels::RopeLayout::kHalves) == v1::ROPE_LAYOUT_HALVES);
static_assert(static_cast<int>(kernels::AttentionKind::kDense) == v1::ATTENTION_KIND_DENSE);
static_assert(static_cast<int>(kernels::AttentionKind::kSparse) == v1::ATTENTION_KIND_SPARSE_V32);
static_assert(static_cast<int>(kernels::AttentionKind::kWindow) == v1::ATTENTION_KIND_SPARSE_V4);

void FillModel(const ModelSpec& from, v1::ModelSpec* message) {
  message->set_model_id(from.id);
  message->mutable_geometry()->set_num_heads(static_cast<uint32_t>(from.geometry.num_heads));
  message->mutable_geometry()->set_kv_lora_rank(static_cast<uint32_t>(from.geometry.kv_lora_rank));
  message->mutable_geometry()->set_rope_dim(static_cast<uint32_t>(from.geometry.rope_dim));
  message->mutable_geometry()->set_nope_dim(static_cast<uint32_t>(from.geometry.nope_dim));
  message->mutable_geometry()->set_v_dim(static_cast<uint32_t>(from.geometry.v_dim));
  message->set_layers(static_cast<uint32_t>(from.layers));
  message->set_softmax_scale(from.softmax_scale);
  const bool bf16 = from.kv_format == kernels::KvFormat::kBf16;
  message->set_kv_dtype(bf16 ? v1::DTYPE_BF16 : v1::DTYPE_UNSPECIFIED);
  message->set_kv_format(ToProto(from.kv_format));
  if (from.fp8_compute != scheduler::Fp8Compute::kAuto) {
    const bool on = from.fp8_compute == scheduler::Fp8Compute::kOn;
    message->set_fp8_compute(on ? v1::FP8_COMPUTE_ON : v1::FP8_COMPUTE_OFF);
  }
  message->set_rope_owner(from.projected.present() ? v1::ROPE_OWNER_SERVER : v1::ROPE_OWNER_WORKER);
  message->set_q_lora_rank(static_cast<uint32_t>(from.projected.q_lora_rank));
  message->set_hidden_size(static_cast<uint32_t>(from.projected.hidden_size));
  message->set_rope_layout(static_cast<v1::RopeLayout>(from.rope));  // numbered alike
  if (from.projected.present()) {
    message->set_projected_dtype(from.projected.codes() ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16);
  }
  message->set_page_size(static_cast<uint32_t>(from.page_size));
  message->set_attention(static_cast<v1::AttentionKind>(from.attention));  // numbered alike
  if (from.windowed()) {
    message->set_window(static_cast<uint32_t>(from.window));
    for (const int32_t ratio : from.ratios) message->add_ratios(static_cast<uint32_t>(ratio));
    message->set_entry_format(ToProto(from.entry_format));
    message->set_tail_bytes(static_cast<uint32_t>(from.tail_bytes));
    message->set_needs_sinks(from.needs_sinks);
  }
  message->set_top_k(static_cast<uint32_t>(from.top_k));
  message->set_index_heads(static_cast<uint32_t>(from.indexer.heads));
  message->set_index_dim(static_cast<uint32_t>(from.indexer.dim));
  message->set_query_precision(from.query_precision == scheduler::QueryPrecision::kSplit
                                   ? v1::QUERY_PRECISION_SPLIT
                                   : v1::QUERY_PRECISION_BF16);
  message->set_weights_digest(from.weights_digest);
}

}  // namespace mla::server
