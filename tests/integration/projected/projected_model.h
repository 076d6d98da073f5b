// A worker of PROFILE_PROJECTED with random weights, and its attention layer computed in double
// precision, independently of the product.
#ifndef MLA_TESTS_INTEGRATION_PROJECTED_PROJECTED_MODEL_H_
#define MLA_TESTS_INTEGRATION_PROJECTED_PROJECTED_MODEL_H_

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "tests/integration/dense_model.h"

namespace mla::integration {

struct ProjectedDims {
  Dims dims;
  int q_lora = 44, hidden = 72;
  v1::RopeLayout rope = v1::ROPE_LAYOUT_HALVES;
  v1::DType weights = v1::DTYPE_UNSPECIFIED;  // ModelSpec.projected_dtype
};

v1::ModelSpec SpecOf(const ProjectedDims& dims, const std::string& id);

// bf16 weights of each layer: W_UQ [heads, nope + rope, q_lora] and W_O [hidden, heads * v].
struct ProjectedWeights {
  Weights up;  // W_UK and W_UV
  std::vector<std::vector<uint16_t>> uq, wo;
};
ProjectedWeights RandomProjectedWeights(const ProjectedDims& dims, std::mt19937_64* random);

// A matrix of e4m3 codes with a scale for each block of 128 x 128.
struct Fp8Matrix {
  size_t rows, columns;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  size_t block_columns() const { return (columns + 127) / 128; }
  float ScaleOf(size_t r, size_t c) const { return scales[r / 128 * block_columns() + c / 128]; }
};
// Quantizes a matrix and replaces its values by the values of the codes.
Fp8Matrix Quantize(size_t rows, size_t columns, std::mt19937_64* random,
                   std::vector<uint16_t>* values);

// Cosine distance of a row of `dtype` from the right one.
double CosineDistance(const std::vector<double>& want, const void* got, v1::DType dtype);

// Returns the chunks of W_UQ and W_O of heads [begin, end) of all layers. With `fp8` the chunks
// have e4m3 codes with a scale a block, and `weights` is replaced by the values of the codes.
// REQUIRES: `weights` has these dims.
std::vector<client::WeightsChunk> ProjectedChunks(const ProjectedDims& dims, int begin, int end,
                                                  bool fp8, ProjectedWeights* weights);

struct ProjectedTrack {
  client::Sequence sequence;
  DenseCache cache;
};

class ProjectedWorker final {
 public:
  ProjectedWorker(client::Client* client, const ProjectedDims& dims, const std::string& model_id,
                  uint64_t seed);
  absl::Status Upload(bool fp8);
  absl::StatusOr<ProjectedTrack> Open();
  // Runs one whole step as Worker::Step does; EndStep keeps `keep[i]` rows of `tracks[i]` (empty:
  // all). `worst` is raised to the largest cosine distance of a row of hidden states from the model
  // in double precision.
  absl::Status Step(const std::vector<ProjectedTrack*>& tracks, const std::vector<uint32_t>& rows,
                    v1::DType dtype, double* worst, const std::vector<uint32_t>& keep = {});
  client::Session& session() { return *session_; }
  // Random rotations of `rows` rows.
  std::vector<float> Rotations(size_t rows);
  // One row of hidden states in double precision. `cache` has the rows of its layer.
  std::vector<double> Hidden(int layer, const std::vector<uint16_t>& cache, int position,
                             std::span<const uint16_t> query,
                             std::span<const float> rotation) const;
  const ProjectedWeights& weights() const { return weights_; }

 private:
  absl::Status Layer(client::Step* step, int layer, const std::vector<ProjectedTrack*>& tracks,
                     const std::vector<uint32_t>& rows, std::span<const float> rotations,
                     v1::DType dtype, double* worst);

  client::Client* const client_;
  const ProjectedDims dims_;
  const std::string model_id_;
  std::mt19937_64 random_;
  ProjectedWeights weights_;
  std::unique_ptr<client::Session> session_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_PROJECTED_PROJECTED_MODEL_H_
