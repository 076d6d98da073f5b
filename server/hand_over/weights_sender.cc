#include "server/hand_over/weights_sender.h"

#include <openssl/evp.h>

#include <memory>
#include <span>
#include <string>

#include "base/status_macros.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

using kernels::Bf16;
using kernels::ProjectedPart;

constexpr unsigned kDigestBytes = 32;

class Sender {
 public:
  Sender(scheduler::Engine* engine, const scheduler::HeldWeights& model, const WeightsSink& sink,
         uint64_t* bytes)
      : engine_(engine),
        model_(model),
        sink_(sink),
        bytes_(bytes),
        digest_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(digest_.get(), EVP_sha256(), nullptr);
  }

  absl::Status Header() {
    v1::UploadWeightsRequest message;
    v1::UploadWeightsRequest::Header* const header = message.mutable_header();
    header->set_model_id(model_.spec->id);
    header->set_tenant(model_.tenant);
    FillModel(*model_.spec, header->mutable_model());
    header->mutable_kv_scales()->Assign(model_.kv_scales.begin(), model_.kv_scales.end());
    return sink_(message);
  }

  // All weights of one head in one layer.
  absl::Status Head(int32_t layer, int32_t head) {
    MLA_RETURN_IF_ERROR(
        Chunk(layer, head, v1::WEIGHT_PART_UP, model_.spec->head_elements(),
              [&](std::span<Bf16> to) { return engine_->ReadWeights(model_, layer, head, to); }));
    if (!model_.spec->projected.present()) return absl::OkStatus();
    for (const auto& [part, name] : {std::pair(ProjectedPart::kQueries, v1::WEIGHT_PART_QUERIES),
                                     std::pair(ProjectedPart::kOutputs, v1::WEIGHT_PART_OUTPUTS)}) {
      MLA_RETURN_IF_ERROR(Chunk(layer, head, name, model_.spec->head_elements(part),
                                [&, part = part](std::span<Bf16> to) {
                                  return engine_->ReadProjected(model_, part, layer, head, to);
                                }));
    }
    return absl::OkStatus();
  }

  absl::Status Trailer() {
    v1::UploadWeightsRequest message;
    std::string* const sha256 = message.mutable_trailer()->mutable_sha256();
    sha256->resize(kDigestBytes);
    EVP_DigestFinal_ex(digest_.get(), reinterpret_cast<unsigned char*>(sha256->data()), nullptr);
    return sink_(message);
  }

 private:
  template <typename Read>
  absl::Status Chunk(int32_t layer, int32_t head, v1::WeightPart part, int64_t elements,
                     const Read& read) {
    v1::UploadWeightsRequest message;
    v1::UploadWeightsRequest::Chunk* const chunk = message.mutable_chunk();
    chunk->set_layer(static_cast<uint32_t>(layer));
    chunk->set_head_begin(static_cast<uint32_t>(head));
    chunk->set_head_count(1);
    chunk->set_part(part);
    std::string* const payload = chunk->mutable_payload();
    const auto count = static_cast<size_t>(elements);
    payload->resize(count * sizeof(Bf16));
    MLA_RETURN_IF_ERROR(read(std::span(reinterpret_cast<Bf16*>(payload->data()), count)));
    EVP_DigestUpdate(digest_.get(), payload->data(), payload->size());
    const uint64_t bytes = payload->size();
    MLA_RETURN_IF_ERROR(sink_(message));
    *bytes_ += bytes;
    return absl::OkStatus();
  }

  scheduler::Engine* const engine_;
  const scheduler::HeldWeights& model_;
  const WeightsSink& sink_;
  uint64_t* const bytes_;
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> digest_;
};

}  // namespace

absl::Status SendWeights(scheduler::Engine* engine, const scheduler::HeldWeights& model,
                         const WeightsSink& sink, uint64_t* bytes) {
  Sender sender(engine, model, sink, bytes);
  MLA_RETURN_IF_ERROR(sender.Header());
  for (int32_t layer = 0; layer < model.spec->layers; ++layer) {
    for (int32_t head = 0; head < model.spec->geometry.num_heads; ++head) {
      MLA_RETURN_IF_ERROR(sender.Head(layer, head));
    }
  }
  return sender.Trailer();
}

}  // namespace mla::server
