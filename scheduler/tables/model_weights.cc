#include "scheduler/tables/model_weights.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/tables/model_table.h"

namespace mla::scheduler {
namespace {

using kernels::Bf16;

// Returns a digest that tells a repeated upload from a changed one. It need not be cryptographic,
// because a tenant can only confuse its own model, and a SHA-256 protects the upload as a whole.
uint64_t Digest(const Bf16* values, int64_t count, uint64_t seed) {
  return XXH3_64bits_withSeed(values, static_cast<size_t>(count) * sizeof(Bf16), seed);
}

absl::Status CheckSize(size_t got, int64_t want) {
  return CheckRange("weights", static_cast<int64_t>(got), want, want);
}

absl::Status CheckHeads(const ModelSpec& spec, int32_t layer, int32_t head_begin,
                        int32_t head_count) {
  const int32_t heads = spec.geometry.num_heads;
  MLA_RETURN_IF_ERROR(CheckRange("chunk.layer", layer, 0, spec.layers - 1));
  MLA_RETURN_IF_ERROR(CheckRange("chunk.head_begin", head_begin, 0, heads - 1));
  return CheckRange("chunk.head_count", head_count, 1, heads - head_begin);
}

absl::Status CheckRead(const Model& model, int32_t layer, int32_t head) {
  if (!model.contents->weights_complete) {
    return RefuseField("model_id", model.spec->id, "a model whose weights are complete",
                       "weights_missing", absl::StatusCode::kFailedPrecondition);
  }
  return CheckHeads(*model.spec, layer, head, 1);
}

}  // namespace

absl::Status ModelWeights::CheckChunk(const Model& model, int32_t layer, int32_t head_begin,
                                      int32_t head_count, std::span<const std::byte> bytes) const {
  if (!model.spec->has_expanded()) {
    return RefuseField("header.model_id", model.spec->id, "a model with nope_dim and v_dim",
                       "no_expanded_profile", absl::StatusCode::kFailedPrecondition);
  }
  absl::Status status = CheckHeads(*model.spec, layer, head_begin, head_count);
  const int64_t want = int64_t{head_count} * model.spec->head_elements() * int64_t{sizeof(Bf16)};
  if (status.ok() && static_cast<int64_t>(bytes.size()) != want) {
    status = RefuseField("chunk.payload", absl::StrCat(bytes.size(), " bytes"),
                         absl::StrCat(want, " bytes"), "payload_size");
  }
  return status;
}

absl::Status ModelWeights::Charge(Model& model) {
  if (model.contents->weights_bytes > 0) return absl::OkStatus();
  const int64_t total = int64_t{model.spec->layers} * model.spec->layer_weight_bytes();
  absl::Status status =
      table_->TakeOrYield(*model.account, Resource::kWeightBytes, total, "header.model_id", &model);
  if (status.ok()) model.contents->weights_bytes = total;
  return status;
}

absl::StatusOr<bool> ModelWeights::IsRepeat(const ModelContents::Head& head, uint64_t digest,
                                            int32_t layer, int32_t number) {
  if (head.upload != ModelContents::kCommitted) return false;
  if (head.digest == digest) return true;
  return RefuseField("chunk.payload",
                     absl::StrCat("other weights of layer ", layer, " head ", number),
                     "equal to those in use; Unregister the model to change them", "weights_differ",
                     absl::StatusCode::kAlreadyExists);
}

absl::Status ModelWeights::CheckProjectedHeads(const Model& model, int32_t layer,
                                               int32_t head_begin, int32_t head_count) const {
  if (model.spec->projected.present()) {
    return CheckHeads(*model.spec, layer, head_begin, head_count);
  }
  return RefuseField("chunk.part", "weights of PROFILE_PROJECTED",
                     "WEIGHT_PART_UP: the model was registered without q_lora_rank",
                     "no_projected_profile", absl::StatusCode::kFailedPrecondition);
}

absl::Status ModelWeights::LoadProjected(Model& model, UploadId upload, kernels::ProjectedPart part,
                                         int32_t layer, int32_t head,
                                         std::span<const std::byte> weights) {
  MLA_RETURN_IF_ERROR(CheckProjectedHeads(model, layer, head, 1));
  MLA_RETURN_IF_ERROR(CheckSize(weights.size(), model.spec->head_bytes(part, head)));
  MLA_RETURN_IF_ERROR(Charge(model));
  ModelContents& contents = *model.contents;
  const int32_t heads = model.spec->geometry.num_heads;
  ModelContents::Head& own =
      contents.heads[size_t(layer) * contents.layer_heads + (1 + size_t(part)) * heads + head];
  const uint64_t digest = XXH3_64bits(weights.data(), weights.size());
  MLA_ASSIGN_OR_RETURN(const bool repeat, IsRepeat(own, digest, layer, head));
  if (repeat) return absl::OkStatus();
  MLA_RETURN_IF_ERROR(backend_->LoadProjected(table_->weights_slot(model, layer),
                                              model.spec->geometry, model.spec->projected, part,
                                              head, weights.data()));
  own = {upload, digest};
  return absl::OkStatus();
}

absl::Status ModelWeights::Load(Model& model, UploadId upload, int32_t layer, int32_t head_begin,
                                int32_t head_count, std::span<const std::byte> bytes) {
  MLA_RETURN_IF_ERROR(CheckChunk(model, layer, head_begin, head_count, bytes));
  MLA_RETURN_IF_ERROR(Charge(model));
  const kernels::Geometry& g = model.spec->geometry;
  const int64_t uk = int64_t{g.nope_dim} * g.kv_lora_rank;
  const int64_t uv = int64_t{g.kv_lora_rank} * g.v_dim;
  const Bf16* w_uk = reinterpret_cast<const Bf16*>(bytes.data());
  const Bf16* w_uv = w_uk + head_count * uk;
  ModelContents::Head* heads =
      &model.contents->heads[size_t(layer) * model.contents->layer_heads + head_begin];
  for (int32_t h = 0; h < head_count; ++h) {
    const uint64_t digest = Digest(w_uk + h * uk, uk, Digest(w_uv + h * uv, uv, 0));
    MLA_ASSIGN_OR_RETURN(const bool repeat, IsRepeat(heads[h], digest, layer, head_begin + h));
    if (repeat) continue;
    MLA_RETURN_IF_ERROR(backend_->LoadWeights(table_->weights_slot(model, layer), g, head_begin + h,
                                              head_begin + h + 1, w_uk + h * uk, w_uv + h * uv));
    heads[h] = {upload, digest};
  }
  return absl::OkStatus();
}

std::vector<int32_t> ModelWeights::Commit(Model& model, UploadId upload) {
  for (ModelContents::Head& head : model.contents->heads) {
    if (head.upload == upload) head.upload = ModelContents::kCommitted;
  }
  std::vector<int32_t> missing = MissingLayers(model);
  model.contents->weights_complete = missing.empty() && model.spec->has_expanded();
  return missing;
}

void ModelWeights::Discard(Model& model, UploadId upload) {
  for (ModelContents::Head& head : model.contents->heads) {
    if (head.upload == upload) head = ModelContents::Head();
  }
  const std::vector<ModelContents::Head>& heads = model.contents->heads;
  const bool any = std::any_of(heads.begin(), heads.end(),
                               [](const ModelContents::Head& head) { return head.upload != 0; });
  if (!any) table_->GiveWeightsBack(model);
}

absl::Status ModelWeights::Read(const Model& model, int32_t layer, int32_t head,
                                std::span<Bf16> weights) const {
  const kernels::Geometry& g = model.spec->geometry;
  MLA_RETURN_IF_ERROR(CheckRead(model, layer, head));
  MLA_RETURN_IF_ERROR(CheckSize(weights.size(), model.spec->head_elements()));
  Bf16* const w_uv = weights.data() + int64_t{g.nope_dim} * g.kv_lora_rank;
  return backend_->ReadWeights(table_->weights_slot(model, layer), g, head, weights.data(), w_uv);
}

absl::Status ModelWeights::ReadProjected(const Model& model, kernels::ProjectedPart part,
                                         int32_t layer, int32_t head,
                                         std::span<std::byte> weights) const {
  MLA_RETURN_IF_ERROR(CheckProjectedHeads(model, layer, head, 1));
  MLA_RETURN_IF_ERROR(CheckRead(model, layer, head));
  MLA_RETURN_IF_ERROR(CheckSize(weights.size(), model.spec->head_bytes(part, head)));
  return backend_->ReadProjected(table_->weights_slot(model, layer), model.spec->geometry,
                                 model.spec->projected, part, head, weights.data());
}

std::vector<int32_t> ModelWeights::MissingLayers(const Model& model) const {
  std::vector<int32_t> missing;
  for (int32_t layer = 0; layer < model.spec->layers; ++layer) {
    if (!model.contents->HasLayer(layer)) missing.push_back(layer);
  }
  return missing;
}

}  // namespace mla::scheduler
