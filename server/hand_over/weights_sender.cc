#include "server/hand_over/weights_sender.h"

#include <span>
#include <string>

#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {

using kernels::Bf16;
using kernels::ProjectedPart;

WeightsCall::WeightsCall(OutgoingWeights* weights, const WeightsSink& sink)
    : weights_(weights),
      sink_(sink),
      digest_(weights->attempt == 0 ? DigestKind::kSha256 : DigestKind::kXxh3) {
  digest_.Begin();
}

absl::Status WeightsCall::SendHeader(bool is_part) {
  const scheduler::HeldWeights& model = *weights_->model;
  v1::UploadWeightsRequest message;
  v1::UploadWeightsRequest::Header* const header = message.mutable_header();
  header->set_model_id(model.spec->id);
  header->set_tenant(model.tenant);
  header->set_attempt(weights_->attempt);
  header->set_is_part(is_part);
  if (!is_part) {
    FillModel(*model.spec, header->mutable_model());
    header->mutable_kv_scales()->Assign(model.kv_scales.begin(), model.kv_scales.end());
    header->mutable_sinks()->Assign(model.sinks.begin(), model.sinks.end());
  }
  return sink_(message);
}

absl::Status WeightsCall::SendHeads() {
  const scheduler::ModelSpec& spec = *weights_->model->spec;
  if (!weights_->model->sinks.empty()) return absl::OkStatus();
  const int64_t heads = spec.geometry.num_heads;
  while (!weights_->failed) {
    const int64_t next = weights_->taken++;
    if (next >= spec.layers * heads) return absl::OkStatus();
    MLA_RETURN_IF_ERROR(
        SendHead(static_cast<int32_t>(next / heads), static_cast<int32_t>(next % heads)));
  }
  return MakeError(absl::StatusCode::kCancelled, "another call of the transfer has failed",
                   {.reason = "part_failed"});
}

absl::Status WeightsCall::SendTrailer(uint32_t parts) {
  v1::UploadWeightsRequest message;
  v1::UploadWeightsRequest::Trailer* const trailer = message.mutable_trailer();
  (weights_->attempt == 0 ? *trailer->mutable_sha256() : *trailer->mutable_xxh3()) = digest_.End();
  trailer->set_parts(parts);
  return sink_(message);
}

// Sends all weights of one head in one layer.
absl::Status WeightsCall::SendHead(int32_t layer, int32_t head) {
  scheduler::Engine* const engine = weights_->engine;
  const scheduler::HeldWeights& model = *weights_->model;
  const auto read_up = [&](std::span<std::byte> target) {
    return engine->ReadWeights(
        model, layer, head,
        std::span(reinterpret_cast<Bf16*>(target.data()), target.size() / sizeof(Bf16)));
  };
  const int64_t up_bytes = model.spec->head_elements() * int64_t{sizeof(Bf16)};
  MLA_RETURN_IF_ERROR(
      SendChunk(layer, head, v1::WEIGHT_PART_UP, v1::DTYPE_BF16, up_bytes, read_up));
  if (!model.spec->projected.present()) return absl::OkStatus();
  const v1::DType dtype = model.spec->projected.codes() ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
  for (const auto& [part, name] : {std::pair(ProjectedPart::kQueries, v1::WEIGHT_PART_QUERIES),
                                   std::pair(ProjectedPart::kOutputs, v1::WEIGHT_PART_OUTPUTS)}) {
    MLA_RETURN_IF_ERROR(SendChunk(layer, head, name, dtype, model.spec->head_bytes(part, head),
                                  [&, part = part](std::span<std::byte> to) {
                                    return engine->ReadProjected(model, part, layer, head, to);
                                  }));
  }
  return absl::OkStatus();
}

template <typename Read>
absl::Status WeightsCall::SendChunk(int32_t layer, int32_t head, v1::WeightPart part,
                                    v1::DType dtype, int64_t bytes, const Read& read) {
  v1::UploadWeightsRequest::Chunk* const chunk = message_.mutable_chunk();
  chunk->set_layer(static_cast<uint32_t>(layer));
  chunk->set_head_begin(static_cast<uint32_t>(head));
  chunk->set_head_count(1);
  chunk->set_part(part);
  chunk->set_dtype(dtype);
  std::string* const payload = chunk->mutable_payload();
  payload->resize(static_cast<size_t>(bytes));
  MLA_RETURN_IF_ERROR(
      read(std::span(reinterpret_cast<std::byte*>(payload->data()), payload->size())));
  digest_.Add(*payload);
  MLA_RETURN_IF_ERROR(sink_(message_));
  bytes_ += static_cast<uint64_t>(bytes);
  return absl::OkStatus();
}

}  // namespace mla::server
