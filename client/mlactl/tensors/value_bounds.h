// Computes the largest |V| among the rows to which each row of a sequence attends: the scale of an
// absolute bound on its outputs. V is the latent part of the KV rows for ABSORBED and that times
// W_UV for EXPANDED, over all heads of the layer.
#ifndef MLA_CLIENT_MLACTL_TENSORS_VALUE_BOUNDS_H_
#define MLA_CLIENT_MLACTL_TENSORS_VALUE_BOUNDS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mla/v1/attention.pb.h"
#include "mla/v1/model.pb.h"

namespace mla::mlactl {

// Keeps W_UV of one model. Threading: not thread-safe.
class ValueProjection final {
 public:
  explicit ValueProjection(const v1::ModelSpec& model);

  // `weights` has the bytes of UploadWeightsRequest.Chunk: bf16 W_UK, then W_UV.
  void Add(uint32_t layer, uint32_t head_begin, uint32_t head_count,
           std::span<const std::byte> weights);
  // Returns the largest |V| that one row of latent values has after the projection; 0 without
  // weights.
  float Largest(uint32_t layer, std::span<const float> latent);

 private:
  const size_t heads_, lora_, nope_, v_;
  std::vector<std::vector<float>> layers_;  // [heads, lora, v], or empty
  std::vector<float> row_;                  // [v]
};

// Keeps the bounds of one sequence's rows. Copyable: a fork is a copy.
class ValueBounds final {
 public:
  explicit ValueBounds(uint32_t layers) : layers_(layers) {}

  // Adds row `position` of a layer, given by its latent values. Rows are added in order; a repeated
  // row is ignored.
  void AddRow(uint32_t layer, uint64_t position, std::span<const float> latent,
              ValueProjection* projection);
  // Returns the largest |V| of rows 0..position. REQUIRES: they have been added.
  double Largest(uint32_t layer, uint64_t position, v1::Profile profile) const;
  bool Has(uint32_t layer, uint64_t position) const {
    return position < layers_[layer].latent.size();
  }
  void Truncate(uint64_t rows);

 private:
  struct Layer {
    std::vector<float> latent, projected;  // running maxima
  };
  std::vector<Layer> layers_;
};

// Converts `count` values of `bytes`, which are bf16 or fp32.
std::vector<float> ToFloats(std::span<const std::byte> bytes, v1::DType dtype);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TENSORS_VALUE_BOUNDS_H_
