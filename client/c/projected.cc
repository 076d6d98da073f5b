// Weights of the PROJECTED profile.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/c/connection.h"
#include "client/c/handles.h"

namespace mla::capi {
namespace {

constexpr uint64_t kBlock = 128;  // rows and columns of a block with one scale

// Cuts W_UQ, and then W_O, into chunks of as many heads as a message may hold.
class ProjectedSource final {
 public:
  ProjectedSource(const v1::ModelSpec& spec, uint64_t most_bytes,
                  const mla_projected_weights& weights)
      : weights_(weights),
        fp8_(weights.w_uq_scales != nullptr),
        q_dim_(uint64_t{spec.geometry().nope_dim()} + spec.geometry().rope_dim()),
        v_dim_(spec.geometry().v_dim()),
        q_lora_(spec.q_lora_rank()),
        hidden_(spec.hidden_size()),
        heads_(spec.geometry().num_heads()),
        most_bytes_(most_bytes) {}

  std::optional<client::WeightsChunk> Next() {
    if (done_ == weights_.head_count) {
      if (std::exchange(outputs_, true)) return std::nullopt;
      done_ = 0;
    }
    const uint64_t head = (outputs_ ? hidden_ * v_dim_ : q_dim_ * q_lora_) * Element();
    // Scales take less than a 64th of the codes' bytes in any model that needs several chunks.
    const uint64_t fits =
        std::max<uint64_t>(1, most_bytes_ / std::max<uint64_t>(1, head + head / 64));
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(fits, weights_.head_count - done_));
    client::WeightsChunk chunk{weights_.layer, weights_.head_begin + done_, count, {}};
    chunk.part = outputs_ ? v1::WEIGHT_PART_OUTPUTS : v1::WEIGHT_PART_QUERIES;
    chunk.dtype = fp8_ ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
    chunk.bytes.reserve(count * head);
    if (outputs_) {
      AddOutputs(count, &chunk.bytes);
    } else {
      chunk.bytes.append(static_cast<const char*>(weights_.w_uq) + done_ * head, count * head);
    }
    if (fp8_) AddScales(chunk.head_begin, count, &chunk.bytes);
    done_ += count;
    return chunk;
  }

 private:
  uint64_t Element() const { return fp8_ ? 1 : 2; }

  // W_O has a row of all given heads for each hidden element.
  void AddOutputs(uint32_t count, std::string* bytes) const {
    const uint64_t row = weights_.head_count * v_dim_ * Element();
    const uint64_t first = done_ * v_dim_ * Element();
    for (uint64_t i = 0; i < hidden_; ++i) {
      bytes->append(static_cast<const char*>(weights_.w_o) + i * row + first,
                    count * v_dim_ * Element());
    }
  }

  // The scales of the blocks that heads [begin, begin + count) of the model touch.
  void AddScales(uint64_t begin, uint64_t count, std::string* bytes) const {
    const uint64_t dim = outputs_ ? v_dim_ : q_dim_;
    const uint64_t first = begin * dim / kBlock, end = ((begin + count) * dim - 1) / kBlock + 1;
    const float* const scales = outputs_ ? weights_.w_o_scales : weights_.w_uq_scales;
    const auto add = [&](uint64_t at, uint64_t numbers) {
      bytes->append(reinterpret_cast<const char*>(scales + at), numbers * sizeof(float));
    };
    if (!outputs_) {
      const uint64_t columns = (q_lora_ + kBlock - 1) / kBlock;
      return add(first * columns, (end - first) * columns);
    }
    const uint64_t columns = (heads_ * v_dim_ + kBlock - 1) / kBlock;
    for (uint64_t row = 0; row < (hidden_ + kBlock - 1) / kBlock; ++row) {
      add(row * columns + first, end - first);
    }
  }

  const mla_projected_weights weights_;
  const bool fp8_;
  const uint64_t q_dim_, v_dim_, q_lora_, hidden_, heads_, most_bytes_;
  bool outputs_ = false;  // W_UQ has been cut
  uint32_t done_ = 0;     // heads of the matrix that is being cut
};

absl::Status UploadProjected(mla_client* client, const char* model_id,
                             const mla_projected_weights* given, int32_t* complete) {
  mla_projected_weights weights;
  absl::Status status = Read(given, true, "weights", &weights);
  if (status.ok()) status = CheckNotNull(model_id, "model_id");
  if (status.ok()) status = CheckNotNull(weights.w_uq, "weights.w_uq");
  if (status.ok()) status = CheckNotNull(weights.w_o, "weights.w_o");
  if (status.ok() && (weights.w_uq_scales == nullptr) != (weights.w_o_scales == nullptr)) {
    status = CheckNotNull(
        nullptr, weights.w_o_scales == nullptr ? "weights.w_o_scales" : "weights.w_uq_scales");
  }
  if (!status.ok()) return status;
  const auto spec = client->With([&](auto* one) { return one->RegisteredModel(model_id); });
  if (!spec.ok()) return spec.status();
  const uint32_t heads = spec->geometry().num_heads();
  // The library reads the scales of these heads before the server has seen the call.
  if (spec->q_lora_rank() == 0 || weights.head_count == 0 || weights.head_begin >= heads ||
      weights.head_count > heads - weights.head_begin) {
    return Refuse(
        spec->q_lora_rank() == 0 ? "model_id" : "weights.head_count",
        spec->q_lora_rank() == 0 ? "a model with q_lora_rank" : "heads of the model, at least 1",
        std::to_string(weights.head_begin) + " + " + std::to_string(weights.head_count));
  }
  const auto all = std::make_shared<std::atomic<int32_t>>(0);
  const auto send = [all, id = std::string(model_id), spec = *spec,
                     weights](client::Client* server) {
    ProjectedSource chunks(spec, server->info().limits().weight_chunk_bytes(), weights);
    const auto reply = server->UploadWeights(id, [&chunks] { return chunks.Next(); });
    if (reply.ok()) *all = reply->complete() ? 1 : 0;
    return reply.status();
  };
  if (client->cluster == nullptr) {
    status = send(client->client.get());
  } else {
    // Servers that get the model later are sent the same tensors.
    status = client->cluster->Upload(model_id,
                                     "projected weights " + std::to_string(weights.layer) + ":" +
                                         std::to_string(weights.head_begin) + "+" +
                                         std::to_string(weights.head_count),
                                     send);
  }
  if (status.ok() && complete != nullptr) *complete = *all;
  return status;
}

}  // namespace
}  // namespace mla::capi

mla_code mla_upload_projected(mla_client* client, const char* model_id,
                              const mla_projected_weights* weights, int32_t* complete,
                              mla_error** error) {
  return mla::capi::Guard(
      error, [&] { return mla::capi::UploadProjected(client, model_id, weights, complete); });
}
