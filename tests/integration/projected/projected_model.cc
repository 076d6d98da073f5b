#include "tests/integration/projected/projected_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/formats/fp8.h"

namespace mla::integration {
namespace {

constexpr kernels::Fp8Kind kCodes = kernels::Fp8Kind::kE4m3Fn;
constexpr size_t kBlock = 128;

size_t Size(int value) { return static_cast<size_t>(value); }

// Rows [row, row_end) x columns [column, column_end), with the scales of the blocks that they
// touch.
std::string CutFp8(const Fp8Matrix& m, size_t row, size_t row_end, size_t column,
                   size_t column_end) {
  std::string bytes;
  for (size_t r = row; r < row_end; ++r) {
    bytes.append(reinterpret_cast<const char*>(&m.codes[r * m.columns + column]),
                 column_end - column);
  }
  for (size_t r = row / kBlock; r <= (row_end - 1) / kBlock; ++r) {
    for (size_t c = column / kBlock; c <= (column_end - 1) / kBlock; ++c) {
      bytes.append(reinterpret_cast<const char*>(&m.scales[r * m.block_columns() + c]),
                   sizeof(float));
    }
  }
  return bytes;
}

std::string Cut(const std::vector<uint16_t>& matrix, size_t columns, size_t row, size_t row_end,
                size_t column, size_t column_end) {
  std::string bytes;
  for (size_t r = row; r < row_end; ++r) {
    bytes.append(reinterpret_cast<const char*>(&matrix[r * columns + column]),
                 (column_end - column) * sizeof(uint16_t));
  }
  return bytes;
}

std::vector<std::byte> AsDType(const std::vector<uint16_t>& values, v1::DType dtype) {
  const size_t size = dtype == v1::DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
  std::vector<std::byte> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const float wide = FromBf16(values[i]);
    if (dtype == v1::DTYPE_F32)
      std::memcpy(&bytes[i * size], &wide, size);
    else
      std::memcpy(&bytes[i * size], &values[i], size);
  }
  return bytes;
}

}  // namespace

Fp8Matrix Quantize(size_t rows, size_t columns, std::mt19937_64* random,
                   std::vector<uint16_t>* values) {
  Fp8Matrix matrix{rows, columns, {}, {}};
  const size_t blocks = (rows + kBlock - 1) / kBlock * matrix.block_columns();
  std::uniform_real_distribution<float> scale(0.001f, 0.004f);
  for (size_t i = 0; i < blocks; ++i) matrix.scales.push_back(scale(*random));
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      uint16_t& value = (*values)[r * columns + c];
      const float block = matrix.ScaleOf(r, c);
      matrix.codes.push_back(kernels::EncodeFp8(FromBf16(value) / block, kCodes));
      value = ToBf16(kernels::DecodeFp8(matrix.codes.back(), kCodes) * block);
    }
  }
  matrix.codes.front() = 0x80;  // -0, which quantized checkpoints contain
  values->front() = 0x8000;
  return matrix;
}

double CosineDistance(const std::vector<double>& want, const void* got, v1::DType dtype) {
  const auto* const bytes = static_cast<const std::byte*>(got);
  double dot = 0, a = 0, b = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    float value = 0;
    if (dtype == v1::DTYPE_F32) {
      std::memcpy(&value, bytes + i * sizeof(float), sizeof(float));
    } else {
      uint16_t narrow = 0;
      std::memcpy(&narrow, bytes + i * sizeof(narrow), sizeof(narrow));
      value = FromBf16(narrow);
    }
    dot += want[i] * value;
    a += want[i] * want[i];
    b += double{value} * value;
  }
  return 1 - dot / std::sqrt(a * b);
}

v1::ModelSpec SpecOf(const ProjectedDims& dims, const std::string& id) {
  v1::ModelSpec spec = SpecOf(dims.dims, id);
  spec.set_rope_owner(v1::ROPE_OWNER_SERVER);
  spec.set_rope_layout(dims.rope);
  spec.set_projected_dtype(dims.weights);
  spec.set_q_lora_rank(static_cast<uint32_t>(dims.q_lora));
  spec.set_hidden_size(static_cast<uint32_t>(dims.hidden));
  return spec;
}

ProjectedWeights RandomProjectedWeights(const ProjectedDims& dims, std::mt19937_64* random) {
  const Dims& d = dims.dims;
  ProjectedWeights weights{RandomWeights(d, random), {}, {}};
  for (int layer = 0; layer < d.layers; ++layer) {
    weights.uq.push_back(RandomBf16(Size(d.heads * (d.nope + d.rope) * dims.q_lora), random));
    weights.wo.push_back(RandomBf16(Size(dims.hidden * d.heads * d.v), random));
  }
  return weights;
}

std::vector<client::WeightsChunk> ProjectedChunks(const ProjectedDims& dims, int begin, int end,
                                                  bool fp8, ProjectedWeights* weights) {
  const Dims& d = dims.dims;
  const size_t q_dim = Size(d.nope + d.rope), v = Size(d.v), heads = Size(d.heads);
  const size_t first = Size(begin), last = Size(end);
  std::vector<client::WeightsChunk> chunks;
  std::mt19937_64 random(static_cast<uint64_t>(begin));
  for (size_t layer = 0; layer < Size(d.layers); ++layer) {
    client::WeightsChunk queries{static_cast<uint32_t>(layer),
                                 static_cast<uint32_t>(begin),
                                 static_cast<uint32_t>(end - begin),
                                 {},
                                 v1::WEIGHT_PART_QUERIES};
    client::WeightsChunk outputs = queries;
    outputs.part = v1::WEIGHT_PART_OUTPUTS;
    const size_t q_lora = Size(dims.q_lora), hidden = Size(dims.hidden);
    std::vector<uint16_t>& uq = weights->uq[layer];
    std::vector<uint16_t>& wo = weights->wo[layer];
    if (fp8) {
      queries.dtype = outputs.dtype = v1::DTYPE_F8_E4M3;
      queries.bytes = CutFp8(Quantize(heads * q_dim, q_lora, &random, &uq), first * q_dim,
                             last * q_dim, 0, q_lora);
      outputs.bytes =
          CutFp8(Quantize(hidden, heads * v, &random, &wo), 0, hidden, first * v, last * v);
    } else {
      queries.bytes = Cut(uq, q_lora, first * q_dim, last * q_dim, 0, q_lora);
      outputs.bytes = Cut(wo, heads * v, 0, hidden, first * v, last * v);
    }
    chunks.push_back(std::move(queries));
    chunks.push_back(std::move(outputs));
  }
  return chunks;
}

ProjectedWorker::ProjectedWorker(client::Client* client, const ProjectedDims& dims,
                                 const std::string& model_id, uint64_t seed)
    : client_(client), dims_(dims), model_id_(model_id), random_(seed) {
  const auto registered = client->RegisterModel(SpecOf(dims, model_id));
  if (registered.ok()) session_ = *client->OpenSession();
  weights_ = RandomProjectedWeights(dims, &random_);
}

absl::Status ProjectedWorker::Upload(bool fp8) {
  std::vector<client::WeightsChunk> chunks = ChunksOf(dims_.dims, weights_.up);
  // Chunks of exact weights have some heads each. Blocks of 8-bit weights span heads.
  const int heads = dims_.dims.heads, cut = fp8 ? heads : std::max(1, heads / 3);
  for (int head = 0; head < heads; head += cut) {
    for (auto& chunk : ProjectedChunks(dims_, head, std::min(heads, head + cut), fp8, &weights_)) {
      chunks.push_back(std::move(chunk));
    }
  }
  size_t next = 0;
  const auto reply =
      client_->UploadWeights(model_id_, [&]() -> std::optional<client::WeightsChunk> {
        if (next == chunks.size()) return std::nullopt;
        return std::move(chunks[next++]);
      });
  if (!reply.ok()) return reply.status();
  return reply->complete() ? absl::OkStatus() : absl::InternalError("the upload is incomplete");
}

absl::StatusOr<ProjectedTrack> ProjectedWorker::Open() {
  auto sequence = client_->OpenSequence(model_id_);
  if (!sequence.ok()) return sequence.status();
  return ProjectedTrack{*std::move(sequence), DenseCache(dims_.dims.layers)};
}

std::vector<float> ProjectedWorker::Rotations(size_t rows) {
  std::uniform_real_distribution<float> angle(0.0f, 6.28f);
  const size_t pairs = Size(dims_.dims.rope) / 2;
  std::vector<float> rotations;
  for (size_t row = 0; row < rows; ++row) {
    std::vector<float> sines;
    for (size_t pair = 0; pair < pairs; ++pair) {
      const float a = angle(random_);
      rotations.push_back(std::cos(a));
      sines.push_back(std::sin(a));
    }
    rotations.insert(rotations.end(), sines.begin(), sines.end());
  }
  return rotations;
}

std::vector<double> ProjectedWorker::Hidden(int layer, const std::vector<uint16_t>& cache,
                                            int position, std::span<const uint16_t> query,
                                            std::span<const float> rotation) const {
  const Dims& d = dims_.dims;
  const size_t nope = Size(d.nope), rope = Size(d.rope), lora = Size(d.lora), v = Size(d.v);
  const size_t q_dim = nope + rope, pairs = rope / 2, columns = Size(d.heads) * v;
  const bool halves = dims_.rope == v1::ROPE_LAYOUT_HALVES;
  std::vector<double> hidden(Size(dims_.hidden));
  for (size_t head = 0; head < Size(d.heads); ++head) {
    std::vector<double> q(q_dim);
    for (size_t i = 0; i < q_dim; ++i) {
      const uint16_t* const w = &weights_.uq[Size(layer)][(head * q_dim + i) * query.size()];
      for (size_t k = 0; k < query.size(); ++k) q[i] += double{FromBf16(w[k])} * FromBf16(query[k]);
    }
    for (size_t pair = 0; pair < pairs; ++pair) {
      double& x = q[nope + (halves ? pair : 2 * pair)];
      double& y = q[nope + (halves ? pair + pairs : 2 * pair + 1)];
      const double old = x;
      x = old * rotation[pair] - y * rotation[pairs + pair];
      y = old * rotation[pairs + pair] + y * rotation[pair];
    }
    std::vector<double> absorbed(lora + rope);
    const uint16_t* const uk = &weights_.up.uk[Size(layer)][head * nope * lora];
    for (size_t n = 0; n < nope; ++n) {
      for (size_t i = 0; i < lora; ++i) absorbed[i] += q[n] * FromBf16(uk[n * lora + i]);
    }
    std::copy(q.begin() + d.nope, q.end(), absorbed.begin() + d.lora);
    double lse = 0;
    const std::vector<double> latent = DenseAbsorbed(d, cache, position, absorbed, &lse);
    const uint16_t* const uv = &weights_.up.uv[Size(layer)][head * lora * v];
    for (size_t j = 0; j < v; ++j) {
      double value = 0;
      for (size_t i = 0; i < lora; ++i) value += latent[i] * FromBf16(uv[i * v + j]);
      for (size_t i = 0; i < hidden.size(); ++i) {
        hidden[i] += value * FromBf16(weights_.wo[Size(layer)][i * columns + head * v + j]);
      }
    }
  }
  return hidden;
}

absl::Status ProjectedWorker::Layer(client::Step* step, int layer,
                                    const std::vector<ProjectedTrack*>& tracks,
                                    const std::vector<uint32_t>& rows,
                                    std::span<const float> rotations, v1::DType dtype,
                                    double* worst) {
  const size_t total = step->total_rows(), row_dim = Size(dims_.dims.row());
  const size_t rope = Size(dims_.dims.rope), q_lora = Size(dims_.q_lora);
  const std::vector<uint16_t> kv = RandomBf16(total * row_dim, &random_);
  const std::vector<uint16_t> q = RandomBf16(total * q_lora, &random_);
  const std::vector<std::byte> sent_kv = AsDType(kv, dtype), sent_q = AsDType(q, dtype);
  const size_t out_row = Size(dims_.hidden) * (dtype == v1::DTYPE_F32 ? 4 : 2);
  std::vector<std::byte> out(total * out_row);
  client::AttendCall call;
  call.layer = static_cast<uint32_t>(layer);
  call.row_count = static_cast<uint32_t>(total);
  call.num_heads = static_cast<uint32_t>(dims_.dims.heads);
  call.profile = v1::PROFILE_PROJECTED;
  call.q_dtype = call.o_dtype = dtype;
  call.kv = sent_kv.data();
  call.q = sent_q.data();
  call.o = out.data();
  if (const auto times = step->Attend(call); !times.ok()) return times.status();
  size_t row = 0;
  for (size_t t = 0; t < tracks.size(); ++t) {
    std::vector<uint16_t>& cache = tracks[t]->cache.layer[Size(layer)];
    const size_t before = cache.size() / row_dim;
    cache.insert(cache.end(), kv.begin() + static_cast<std::ptrdiff_t>(row * row_dim),
                 kv.begin() + static_cast<std::ptrdiff_t>((row + rows[t]) * row_dim));
    for (size_t i = 0; i < rows[t]; ++i, ++row) {
      const auto want =
          Hidden(layer, cache, static_cast<int>(before + i),
                 std::span(q).subspan(row * q_lora, q_lora), rotations.subspan(row * rope, rope));
      const double distance = CosineDistance(want, &out[row * out_row], dtype);
      if (!(distance <= *worst)) *worst = distance;  // NaN too
    }
  }
  return absl::OkStatus();
}

absl::Status ProjectedWorker::Step(const std::vector<ProjectedTrack*>& tracks,
                                   const std::vector<uint32_t>& rows, v1::DType dtype,
                                   double* worst, const std::vector<uint32_t>& keep) {
  std::vector<client::StepRows> parts;
  size_t total = 0;
  for (size_t i = 0; i < tracks.size(); ++i) {
    parts.push_back({&tracks[i]->sequence, rows[i]});
    total += rows[i];
  }
  const std::vector<float> rotations = Rotations(total);
  client::BeginOptions options;
  options.rotations = rotations;
  auto step = session_->Begin(model_id_, parts, options);
  if (!step.ok()) return step.status();
  for (int layer = 0; layer < dims_.dims.layers; ++layer) {
    absl::Status status = Layer(step->get(), layer, tracks, rows, rotations, dtype, worst);
    if (!status.ok()) return status;
  }
  const auto ended = keep.empty() ? (*step)->End() : (*step)->End(keep);
  if (!ended.ok()) return ended.status();
  for (size_t i = 0; i < tracks.size(); ++i) {
    tracks[i]->cache.Truncate(dims_.dims, (*ended)[i]);
  }
  return absl::OkStatus();
}

}  // namespace mla::integration
