#include "client/mlactl/bench/projected_chunks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "client/mlactl/tensors/random_tensors.h"

namespace mla::mlactl {
namespace {

constexpr uint64_t kBlock = 128;  // rows and columns of a block with one scale
// Room for the scales of a chunk, as a part of its codes.
constexpr uint64_t kScalesPart = 64;
// Codes with this exponent and any sign and fraction are 0.5 to 0.94.
constexpr uint8_t kExponent = 0x30, kSignAndFraction = 0x87;
constexpr double kMeanCode = 0.72;

// Returns the number of blocks that elements [begin, end) of an axis are in.
uint64_t BlocksOf(uint64_t begin, uint64_t end) { return (end - 1) / kBlock - begin / kBlock + 1; }

}  // namespace

ProjectedChunks::ProjectedChunks(const v1::ModelSpec& model, uint64_t most_bytes, uint64_t seed)
    : model_(model), most_bytes_(most_bytes), seed_(seed) {
  Draw();
}

uint64_t ProjectedChunks::HeadElements() const {
  const v1::Geometry& geometry = model_.geometry();
  return outputs_ ? uint64_t{model_.hidden_size()} * geometry.v_dim()
                  : uint64_t{geometry.nope_dim() + geometry.rope_dim()} * model_.q_lora_rank();
}

uint64_t ProjectedChunks::Depth() const {
  return outputs_ ? uint64_t{model_.geometry().num_heads()} * model_.geometry().v_dim()
                  : model_.q_lora_rank();
}

uint64_t ProjectedChunks::Blocks(uint32_t heads) const {
  const v1::Geometry& geometry = model_.geometry();
  const uint64_t dim = outputs_ ? geometry.v_dim() : geometry.nope_dim() + geometry.rope_dim();
  return BlocksOf(head_ * dim, (head_ + heads) * dim) *
         BlocksOf(0, outputs_ ? model_.hidden_size() : model_.q_lora_rank());
}

void ProjectedChunks::Draw() {
  const uint64_t elements = HeadElements();
  const uint64_t bytes = fp8() ? elements + elements / kScalesPart : elements * sizeof(uint16_t);
  heads_a_chunk_ = static_cast<uint32_t>(
      std::clamp<uint64_t>(most_bytes_ / bytes, 1, model_.geometry().num_heads()));
  if (fp8()) {
    drawn_.resize(elements * heads_a_chunk_);
    std::mt19937_64 random(seed_);
    for (char& code : drawn_) {
      code = static_cast<char>(kExponent | (random() & kSignAndFraction));
    }
    return;
  }
  std::vector<uint16_t> values(elements * heads_a_chunk_);
  FillRandomBf16(seed_, 1.0 / std::sqrt(Depth()), values);
  drawn_.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint16_t));
}

std::optional<client::WeightsChunk> ProjectedChunks::Next() {
  if (layer_ == model_.layers()) return std::nullopt;
  client::WeightsChunk chunk;
  chunk.layer = layer_;
  chunk.head_begin = head_;
  chunk.head_count = std::min(heads_a_chunk_, model_.geometry().num_heads() - head_);
  chunk.part = outputs_ ? v1::WEIGHT_PART_OUTPUTS : v1::WEIGHT_PART_QUERIES;
  chunk.dtype = fp8() ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
  chunk.bytes = drawn_.substr(0, drawn_.size() / heads_a_chunk_ * chunk.head_count);
  if (fp8()) {
    const std::vector<float> scales(Blocks(chunk.head_count),
                                    static_cast<float>(1.0 / (kMeanCode * std::sqrt(Depth()))));
    chunk.bytes.append(reinterpret_cast<const char*>(scales.data()), scales.size() * sizeof(float));
  }
  head_ += chunk.head_count;
  if (head_ < model_.geometry().num_heads()) return chunk;
  head_ = 0;
  layer_ += outputs_ ? 1 : 0;
  outputs_ = !outputs_;
  Draw();
  return chunk;
}

double ProjectedChunks::done() const {
  const double part = outputs_ ? 0.5 : 0, heads = model_.geometry().num_heads();
  return (layer_ + part + head_ / heads / 2) / model_.layers();
}

}  // namespace mla::mlactl
