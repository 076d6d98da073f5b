// A small model, and its attention computed in the obvious way, in double precision and
// independently of the product. Tests compare the server's replies with it.
#ifndef MLA_TESTS_INTEGRATION_DENSE_MODEL_H_
#define MLA_TESTS_INTEGRATION_DENSE_MODEL_H_

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "mla/v1/model.pb.h"

namespace mla::integration {

struct Dims {
  int heads = 4, lora = 32, rope = 8, nope = 16, v = 16, layers = 2, page = 4;
  double scale = 0.25;
  int row() const { return lora + rope; }
};

v1::ModelSpec SpecOf(const Dims& dims, const std::string& id);

float FromBf16(uint16_t value);
uint16_t ToBf16(float value);
// n values uniform in [-0.5, 0.5), as bf16.
std::vector<uint16_t> RandomBf16(size_t n, std::mt19937_64* random);

// Rows of one sequence: per layer, [rows, lora + rope] as bf16.
struct DenseCache {
  explicit DenseCache(int layers) : layer(static_cast<size_t>(layers)) {}
  std::vector<std::vector<uint16_t>> layer;
  void Truncate(const Dims& dims, size_t rows) {
    for (auto& rows_of_layer : layer) {
      rows_of_layer.resize(rows * static_cast<size_t>(dims.row()));
    }
  }
};

struct Weights {  // bf16, W_UK [heads, nope, lora] and W_UV [heads, lora, v] of each layer
  std::vector<std::vector<uint16_t>> uk, uv;
};
Weights RandomWeights(const Dims& dims, std::mt19937_64* random);
// The chunks of an upload, one a layer.
std::vector<client::WeightsChunk> ChunksOf(const Dims& dims, const Weights& weights);

// Output of one head of one query row at position `position`: sees rows 0..position of the cache.
// `q` is [lora + rope]; returns lora values; `lse` the natural log-sum-exp.
std::vector<double> DenseAbsorbed(const Dims& dims, std::span<const uint16_t> rows, int position,
                                  std::span<const double> q, double* lse);
// The EXPANDED form: q [nope + rope], returns v values.
std::vector<double> DenseExpanded(const Dims& dims, std::span<const uint16_t> rows, int position,
                                  std::span<const uint16_t> q, std::span<const uint16_t> w_uk,
                                  std::span<const uint16_t> w_uv);

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_DENSE_MODEL_H_
