#include "tests/integration/dense_model.h"

#include <bit>
#include <cmath>

namespace mla::integration {

v1::ModelSpec SpecOf(const Dims& dims, const std::string& id) {
  v1::ModelSpec spec;
  spec.set_model_id(id);
  spec.mutable_geometry()->set_num_heads(static_cast<uint32_t>(dims.heads));
  spec.mutable_geometry()->set_kv_lora_rank(static_cast<uint32_t>(dims.lora));
  spec.mutable_geometry()->set_rope_dim(static_cast<uint32_t>(dims.rope));
  spec.mutable_geometry()->set_nope_dim(static_cast<uint32_t>(dims.nope));
  spec.mutable_geometry()->set_v_dim(static_cast<uint32_t>(dims.v));
  spec.set_layers(static_cast<uint32_t>(dims.layers));
  spec.set_softmax_scale(dims.scale);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_rope_owner(v1::ROPE_OWNER_WORKER);
  spec.set_page_size(static_cast<uint32_t>(dims.page));
  return spec;
}

float FromBf16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<uint16_t> RandomBf16(size_t n, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  std::vector<uint16_t> values(n);
  for (uint16_t& value : values) value = ToBf16(uniform(*random));
  return values;
}

Weights RandomWeights(const Dims& dims, std::mt19937_64* random) {
  Weights weights;
  for (int layer = 0; layer < dims.layers; ++layer) {
    weights.uk.push_back(
        RandomBf16(static_cast<size_t>(dims.heads * dims.nope * dims.lora), random));
    weights.uv.push_back(RandomBf16(static_cast<size_t>(dims.heads * dims.lora * dims.v), random));
  }
  return weights;
}

std::vector<client::WeightsChunk> ChunksOf(const Dims& dims, const Weights& weights) {
  std::vector<client::WeightsChunk> chunks;
  for (size_t layer = 0; layer < weights.uk.size(); ++layer) {
    client::WeightsChunk chunk;
    chunk.layer = static_cast<uint32_t>(layer);
    chunk.head_count = static_cast<uint32_t>(dims.heads);
    for (const auto* part : {&weights.uk[layer], &weights.uv[layer]}) {
      chunk.bytes.append(reinterpret_cast<const char*>(part->data()), part->size() * 2);
    }
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

std::vector<double> DenseAbsorbed(const Dims& dims, std::span<const uint16_t> rows, int position,
                                  std::span<const double> q, double* lse) {
  const auto row = static_cast<size_t>(dims.row());
  std::vector<double> scores(static_cast<size_t>(position) + 1);
  double maximum = -INFINITY;
  for (size_t i = 0; i < scores.size(); ++i) {
    double dot = 0;
    for (size_t d = 0; d < row; ++d) dot += q[d] * double{FromBf16(rows[i * row + d])};
    scores[i] = dot * dims.scale;
    maximum = std::max(maximum, scores[i]);
  }
  double sum = 0;
  for (double& score : scores) sum += score = std::exp(score - maximum);
  std::vector<double> out(static_cast<size_t>(dims.lora));
  for (size_t i = 0; i < scores.size(); ++i) {
    for (size_t d = 0; d < out.size(); ++d) {
      out[d] += scores[i] / sum * double{FromBf16(rows[i * row + d])};
    }
  }
  *lse = maximum + std::log(sum);
  return out;
}

std::vector<double> DenseExpanded(const Dims& dims, std::span<const uint16_t> rows, int position,
                                  std::span<const uint16_t> q, std::span<const uint16_t> w_uk,
                                  std::span<const uint16_t> w_uv) {
  const auto lora = static_cast<size_t>(dims.lora), nope = static_cast<size_t>(dims.nope);
  const auto v = static_cast<size_t>(dims.v);
  std::vector<double> absorbed(static_cast<size_t>(dims.row()));
  for (size_t n = 0; n < nope; ++n) {
    for (size_t d = 0; d < lora; ++d) {
      absorbed[d] += double{FromBf16(q[n])} * double{FromBf16(w_uk[n * lora + d])};
    }
  }
  for (size_t r = 0; r < static_cast<size_t>(dims.rope); ++r) {
    absorbed[lora + r] = FromBf16(q[nope + r]);
  }
  double lse = 0;
  const std::vector<double> latent = DenseAbsorbed(dims, rows, position, absorbed, &lse);
  std::vector<double> out(v);
  for (size_t d = 0; d < lora; ++d) {
    for (size_t i = 0; i < v; ++i) out[i] += latent[d] * double{FromBf16(w_uv[d * v + i])};
  }
  return out;
}

}  // namespace mla::integration
