#include "scheduler/tables/model_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "kernels/projected_weights.h"
#include "kernels/types/window.h"

namespace mla::scheduler {
namespace {

// Checks the fields of a window. Without a window they must have their default values.
absl::Status CheckWindow(const ModelSpec& spec) {
  const auto layers = static_cast<int64_t>(spec.ratios.size());
  if (layers != (spec.windowed() ? spec.layers : 0)) {
    return RefuseField("model.ratios", absl::StrCat(layers, " entries"),
                       absl::StrCat(spec.windowed() ? spec.layers : 0, ": one a layer of a window"),
                       "wrong_count");
  }
  if (!spec.windowed()) {
    if (!spec.needs_sinks) return absl::OkStatus();
    return RefuseField("model.needs_sinks", "true", "false without a window", "out_of_range");
  }
  bool entries = false;
  for (size_t layer = 0; layer < spec.ratios.size(); ++layer) {
    const int32_t ratio = spec.ratios[layer];
    entries |= ratio > 0;
    if (ratio == 0 || (ratio > 0 && spec.page_size % ratio == 0)) continue;
    return RefuseField(absl::StrCat("model.ratios[", layer, "]"), absl::StrCat(ratio),
                       absl::StrCat("0, or a divisor of the page size, ", spec.page_size),
                       "out_of_range");
  }
  if (!entries) {
    return RefuseField("model.ratios", "0 at every layer", "entries at one layer at least",
                       "out_of_range");
  }
  if (spec.geometry.v_dim > 0) {
    return RefuseField("model.geometry.v_dim", absl::StrCat(spec.geometry.v_dim),
                       "0: attention to a window has no expanded form", "inconsistent");
  }
  return absl::OkStatus();
}

absl::Status CheckProjected(const ModelSpec& spec, const Limits& limits) {
  const bool present = spec.projected.present();
  const int32_t largest = present ? limits.max_hidden_size : 0, least = present ? 1 : 0;
  MLA_RETURN_IF_ERROR(CheckRange("model.q_lora_rank", spec.projected.q_lora_rank, least, largest));
  MLA_RETURN_IF_ERROR(CheckRange("model.hidden_size", spec.projected.hidden_size, least, largest));
  if (present != (spec.rope != kernels::RopeLayout::kNone)) {
    return RefuseField("model.rope_layout", absl::StrCat(static_cast<int>(spec.rope)),
                       "a layout exactly when the model has q_lora_rank", "inconsistent");
  }
  if (!present && spec.projected.codes()) {
    return RefuseField("model.projected_dtype", "e4m3", "unspecified without q_lora_rank",
                       "inconsistent");
  }
  if (!present) return absl::OkStatus();
  if (spec.projected.codes() && !kernels::CanHoldCodes(spec.geometry)) {
    return RefuseField(
        "model.projected_dtype",
        absl::StrCat("e4m3 with nope_dim + rope_dim ", spec.geometry.expanded_q_dim(),
                     " and v_dim ", spec.geometry.v_dim),
        absl::StrCat("bf16, or multiples of ", kernels::kScaledQueryStep, " and ",
                     kernels::kScaledValueStep));
  }
  if (spec.geometry.nope_dim == 0) {
    return RefuseField("model.geometry.nope_dim", "0",
                       "at least 1 with q_lora_rank: the server makes expanded queries");
  }
  if (spec.geometry.rope_dim % 2 == 0) return absl::OkStatus();
  return RefuseField("model.geometry.rope_dim", absl::StrCat(spec.geometry.rope_dim),
                     "an even number with q_lora_rank: pairs are rotated");
}

}  // namespace

absl::Status CheckModelSpec(const ModelSpec& spec, const Limits& limits) {
  const kernels::Geometry& g = spec.geometry;
  const int64_t name_bytes = static_cast<int64_t>(spec.id.size());
  const bool sparse = spec.attention == kernels::AttentionKind::kSparse;
  const bool windowed = spec.windowed();
  const bool indexed = spec.indexer.heads > 0;
  const struct {
    const char* field;
    int64_t got, low, high;
  } ranges[] = {
      {"model.model_id", name_bytes, 1, limits.max_name_bytes},
      {"model.geometry.num_heads", g.num_heads, 1, limits.max_heads},
      {"model.geometry.kv_lora_rank", g.kv_lora_rank, 1, limits.max_row_dim},
      {"model.geometry.rope_dim", g.rope_dim, 0, limits.max_row_dim - g.kv_lora_rank},
      {"model.geometry.nope_dim", g.nope_dim, 0, limits.max_v_dim},
      {"model.geometry.v_dim", g.v_dim, 0, limits.max_v_dim},
      {"model.layers", spec.layers, 1, limits.max_layers},
      {"model.page_size", spec.page_size, 1, 4096},
      {"model.top_k", spec.top_k, sparse ? 1 : 0, sparse || windowed ? limits.max_top_k : 0},
      {"model.tail_bytes", spec.tail_bytes, 0, windowed ? limits.max_tail_bytes : 0},
      {"model.window", spec.window, windowed ? 1 : 0, windowed ? kernels::kMaxWindow : 0},
      {"model.index_heads", spec.indexer.heads, 0, sparse ? kernels::kMaxIndexHeads : 0},
      {"model.index_dim", spec.indexer.dim, indexed ? 1 : 0, indexed ? kernels::kMaxIndexDim : 0},
  };
  for (const auto& r : ranges) {
    MLA_RETURN_IF_ERROR(CheckRange(r.field, r.got, r.low, r.high));
  }
  if ((g.nope_dim == 0) != (g.v_dim == 0)) {
    return RefuseField("model.geometry.v_dim", absl::StrCat(g.v_dim),
                       "zero exactly when nope_dim is zero", "inconsistent");
  }
  const size_t digest = spec.weights_digest.size();
  if (digest != 0 && digest != kWeightsDigestBytes) {
    return RefuseField("model.weights_digest", absl::StrCat(digest, " bytes"),
                       absl::StrCat(kWeightsDigestBytes, " bytes, or none"), "out_of_range");
  }
  if (!std::isfinite(spec.softmax_scale) || spec.softmax_scale <= 0) {
    return RefuseField("model.softmax_scale", absl::StrCat(spec.softmax_scale),
                       "a finite positive number: it is never defaulted", "out_of_range");
  }
  MLA_RETURN_IF_ERROR(CheckProjected(spec, limits));
  return CheckWindow(spec);
}

absl::Status CheckSinks(const ModelSpec& spec, std::span<const float> sinks,
                        const std::string& field, SinkSlice* slice) {
  if (!spec.windowed()) {
    return RefuseField(field, absl::StrCat(sinks.size(), " sinks"),
                       "none: the attention has no window", "wrong_count");
  }
  const int64_t layers = spec.layers, heads = spec.geometry.num_heads;
  MLA_RETURN_IF_ERROR(CheckRange("layer_begin", slice->layer_begin, 0, layers - 1));
  MLA_RETURN_IF_ERROR(CheckRange("head_begin", slice->head_begin, 0, heads - 1));
  MLA_RETURN_IF_ERROR(
      CheckRange("layer_count", slice->layer_count, 0, layers - slice->layer_begin));
  MLA_RETURN_IF_ERROR(CheckRange("head_count", slice->head_count, 0, heads - slice->head_begin));
  if (slice->layer_count == 0) slice->layer_count = layers - slice->layer_begin;
  if (slice->head_count == 0) slice->head_count = heads - slice->head_begin;
  const int64_t wanted = slice->layer_count * slice->head_count;
  if (static_cast<int64_t>(sinks.size()) != wanted) {
    return RefuseField(field, absl::StrCat(sinks.size(), " sinks"),
                       absl::StrCat(wanted, ": one for each of ", slice->layer_count,
                                    " layers and ", slice->head_count, " heads"),
                       "wrong_count");
  }
  for (size_t i = 0; i < sinks.size(); ++i) {
    if (std::isfinite(sinks[i]) || sinks[i] == kNoSink) continue;
    return RefuseField(absl::StrCat(field, "[", i, "]"), absl::StrCat(sinks[i]),
                       "a finite number, or -inf: none", "out_of_range");
  }
  return absl::OkStatus();
}

absl::Status CheckKvScales(const ModelSpec& spec, std::span<const float> scales,
                           const std::string& field) {
  if (kernels::TraitsOf(spec.kv_format).scales != kernels::KvScales::kLayer) {
    return RefuseField(
        field, absl::StrCat("scales for kv_format ", kernels::Name(spec.kv_format)),
        absl::StrCat("a model with kv_format ", kernels::Name(kernels::KvFormat::kFp8Tensor)),
        "no_layer_scales", absl::StatusCode::kFailedPrecondition);
  }
  if (scales.size() != static_cast<size_t>(spec.layers)) {
    return RefuseField(field, absl::StrCat(scales.size(), " scales"),
                       absl::StrCat(spec.layers, ": one a layer"), "wrong_count");
  }
  // Kernels multiply the logits by both at once, in fp32. If the product were zero, a masked key
  // would give NaN; if it were infinite, a logit of zero would.
  constexpr double kLeast = std::numeric_limits<float>::min();
  constexpr double kMost = std::numeric_limits<float>::max() / 4;
  const double least = std::max(double{kernels::kSmallestKvScale}, kLeast / spec.softmax_scale);
  const double largest = std::min(double{kernels::kLargestKvScale}, kMost / spec.softmax_scale);
  for (size_t layer = 0; layer < scales.size(); ++layer) {
    const double scale = scales[layer];
    if (scale >= least && scale <= largest) continue;
    return RefuseField(
        absl::StrCat(field, "[", layer, "]"), absl::StrCat(scales[layer]),
        absl::StrCat("a number from ", static_cast<float>(least), " to ",
                     static_cast<float>(largest), " with softmax_scale ", spec.softmax_scale),
        "out_of_range");
  }
  return absl::OkStatus();
}

kernels::AttentionDesc DescOf(const ModelSpec& spec, kernels::AttentionForm form) {
  kernels::AttentionDesc desc;
  desc.geometry = spec.geometry;
  desc.form = form;
  desc.kv_format = spec.kv_format;
  desc.page_size = spec.page_size;
  if (form == kernels::AttentionForm::kAbsorbed) desc.products = spec.products();
  desc.entry_format = spec.entry_format;
  if (spec.windowed()) desc.attention = spec.attention;  // its rows allow no other attention
  return desc;
}

absl::Status SettlePrecision(const kernels::BackendInfo& backend, ModelSpec* spec) {
  if (spec->query_precision == QueryPrecision::kDefault) {
    spec->query_precision = backend.splits_queries ? QueryPrecision::kSplit : QueryPrecision::kBf16;
  }
  if (spec->query_precision == QueryPrecision::kBf16 || backend.splits_queries) {
    return absl::OkStatus();
  }
  return RefuseField("model.query_precision", "split",
                     absl::StrCat("bf16 on backend ", backend.name), "unsupported_precision",
                     absl::StatusCode::kUnimplemented);
}

// Call it after the checks of geometry, format and attention.
absl::Status SettleFp8Compute(const kernels::AttentionBackend& backend, ModelSpec* spec) {
  const Fp8Compute wanted = spec->fp8_compute;
  if (spec->kv_format == kernels::KvFormat::kBf16) {
    if (wanted != Fp8Compute::kOn) {
      spec->fp8_compute = Fp8Compute::kAuto;
      return absl::OkStatus();
    }
    return RefuseField("model.fp8_compute", "on", "auto or off with rows of bf16", "conflict");
  }
  spec->fp8_compute = Fp8Compute::kOn;
  kernels::AttentionDesc desc = DescOf(*spec, kernels::AttentionForm::kAbsorbed);
  bool offered = backend.CanRun(desc).ok();
  desc.attention = spec->attention;
  offered = offered && backend.CanRun(desc).ok();
  if (wanted == Fp8Compute::kOn && !offered) {
    return RefuseField("model.fp8_compute", "on",
                       absl::StrCat("auto or off on backend ", backend.Info().name),
                       "unsupported_products", absl::StatusCode::kUnimplemented);
  }
  const bool on = wanted == Fp8Compute::kOn ||
                  (wanted == Fp8Compute::kAuto && offered && backend.Info().fp8_products);
  spec->fp8_compute = on ? Fp8Compute::kOn : Fp8Compute::kOff;
  return absl::OkStatus();
}

absl::Status CheckSupported(const ModelSpec& spec, const kernels::AttentionBackend& backend) {
  if (spec.indexer.heads > 0 && !backend.Info().selects) {
    return RefuseField("model.index_heads", absl::StrCat(spec.indexer.heads),
                       absl::StrCat("0 on backend ", backend.Info().name,
                                    ", which makes no index lists: the indexer is the client's"),
                       "unsupported_shape", absl::StatusCode::kUnimplemented);
  }
  const int32_t index_dim = backend.Info().index_dim;
  if (spec.indexer.heads > 0 && index_dim > 0 && spec.indexer.dim != index_dim) {
    return RefuseField("model.index_dim", absl::StrCat(spec.indexer.dim),
                       absl::StrCat(index_dim, " on backend ", backend.Info().name),
                       "unsupported_shape", absl::StatusCode::kUnimplemented);
  }
  if (spec.windowed() && !backend.Info().windows) {
    return RefuseField("model.attention", "a window and entries",
                       absl::StrCat("dense or sparse_v32 on backend ", backend.Info().name),
                       "unsupported_shape", absl::StatusCode::kUnimplemented);
  }
  if (spec.projected.present() && !backend.Info().projects) {
    return RefuseField("model.q_lora_rank", absl::StrCat(spec.projected.q_lora_rank),
                       absl::StrCat("0 on backend ", backend.Info().name,
                                    ", which does not offer PROFILE_PROJECTED"),
                       "unsupported_shape", absl::StatusCode::kUnimplemented);
  }
  kernels::AttentionDesc desc = DescOf(spec, kernels::AttentionForm::kAbsorbed);
  const char* field = "model.geometry";
  absl::Status status = backend.CanRun(desc);
  if (status.ok() && spec.attention != kernels::AttentionKind::kDense) {
    desc.attention = spec.attention;
    field = "model.attention";
    status = backend.CanRun(desc);
  }
  if (status.ok()) return status;
  return MakeError(status.code(), status.message(),
                   {.field = field,
                    .got = kernels::ToString(desc),
                    .limit = backend.Info().supported,
                    .reason = "unsupported_shape"});
}

}  // namespace mla::scheduler
