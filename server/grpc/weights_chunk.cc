// Checks of UploadWeights chunks, and the weights of their heads as backends take them.
#include "server/grpc/weights_chunk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "kernels/formats/kv_format.h"
#include "kernels/projected_weights.h"
#include "server/grpc/field_checks.h"

namespace mla::server {

using scheduler::ModelSpec;

namespace {

kernels::Bf16 WeightAt(const std::string& payload, int64_t index) {
  kernels::Bf16 value;
  std::memcpy(&value, payload.data() + index * int64_t{sizeof(value)}, sizeof(value));
  return value;
}

// The upper half of kWeightBound's bits: the bits of a weight, without its sign, are below it.
constexpr uint32_t kBoundBits = std::bit_cast<uint32_t>(kernels::kWeightBound) >> 16;

bool IsWeight(kernels::Bf16 value) { return (value & 0x7fffu) < kBoundBits; }

// REQUIRES: the payload has the right size.
absl::Status CheckWeights(const v1::UploadWeightsRequest::Chunk& message,
                          const kernels::Geometry& g) {
  const std::string& payload = message.payload();
  const auto count = static_cast<int64_t>(payload.size() / sizeof(kernels::Bf16));
  // Whole blocks come first, because compilers use vector instructions for a fixed number of 16-bit
  // elements without a branch. A sum has its highest bit set if the weight is not below the bound.
  constexpr int64_t kBlock = 2048;
  int64_t index = 0;
  for (; index + kBlock <= count; index += kBlock) {
    kernels::Bf16 block[kBlock];
    std::memcpy(block, payload.data() + index * int64_t{sizeof(block[0])}, sizeof(block));
    uint16_t sums = 0;
    for (const kernels::Bf16 weight : block) {
      sums |= static_cast<uint16_t>((weight & 0x7fffu) + (0x8000u - kBoundBits));
    }
    if ((sums & 0x8000u) != 0) break;
  }
  while (index < count && IsWeight(WeightAt(payload, index))) ++index;
  if (index >= count) return absl::OkStatus();
  const int64_t uk_head = int64_t{g.nope_dim} * g.kv_lora_rank;
  const int64_t uv_head = int64_t{g.kv_lora_rank} * g.v_dim;
  const int64_t uk = uk_head * message.head_count();
  const bool in_uk = index < uk;
  const int64_t inside = in_uk ? index : index - uk;
  const int64_t head = message.head_begin() + inside / (in_uk ? uk_head : uv_head);
  const int64_t element = inside % (in_uk ? uk_head : uv_head);
  const int64_t columns = in_uk ? g.kv_lora_rank : g.v_dim;
  return RefuseField("chunk.payload",
                     absl::StrCat(kernels::ToFloat(WeightAt(payload, index)), " at layer ",
                                  message.layer(), ", head ", head, ", ", in_uk ? "W_UK[" : "W_UV[",
                                  element / columns, ", ", element % columns, "]"),
                     "finite weights of magnitude below 2^20", "not_finite");
}

using kernels::WeightWindow;

// Returns the place of a chunk's elements in the matrix of all heads.
WeightWindow WindowOf(const v1::UploadWeightsRequest::Chunk& chunk, const ModelSpec& model) {
  const bool queries = chunk.part() == v1::WEIGHT_PART_QUERIES;
  return kernels::WindowOf(
      model.geometry, model.projected,
      queries ? kernels::ProjectedPart::kQueries : kernels::ProjectedPart::kOutputs,
      chunk.head_begin(), chunk.head_count());
}

bool IsFp8(const v1::UploadWeightsRequest::Chunk& chunk) {
  return chunk.dtype() == v1::DTYPE_F8_E4M3;
}

// GPUs of gfx942 read this code as NaN, so models of codes hold 0 instead. Models of bf16 must do
// the same: their weights may come from such a model, and a worker's repeat must equal them.
constexpr uint8_t kMinusZeroCode = 0x80;
constexpr kernels::Bf16 kMinusZero = 0x8000;

kernels::Bf16 Fp8WeightAt(const std::string& payload, const WeightWindow& window, int64_t index,
                          int64_t block) {
  const auto code = static_cast<uint8_t>(payload[static_cast<size_t>(index)]);
  return kernels::WidenedWeight(code, kernels::ScaleOf(window, payload.data(), block));
}

// REQUIRES: the payload has the right size.
absl::Status CheckProjectedWeights(const v1::UploadWeightsRequest::Chunk& chunk,
                                   const WeightWindow& window) {
  const std::string& payload = chunk.payload();
  const bool fp8 = IsFp8(chunk);
  const int64_t blocks = fp8 ? window.blocks() : 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const float scale = kernels::ScaleOf(window, payload.data(), block);
    if (scale == 0.0f || (scale >= kernels::kSmallestKvScale && scale <= kernels::kLargestKvScale))
      continue;
    return RefuseField(
        "chunk.payload",
        absl::StrCat("scale ", scale, " of block [", block / window.block_columns(), ", ",
                     block % window.block_columns(), "] at layer ", chunk.layer()),
        "scales of 0, or 2^-100 to 2^72", "bad_scale");
  }
  const char* const name = chunk.part() == v1::WEIGHT_PART_QUERIES ? "W_UQ[" : "W_O[";
  for (int64_t r = 0; r < window.rows; ++r) {
    for (int64_t c = 0; c < window.columns; ++c) {
      const int64_t index = r * window.columns + c;
      // As it will be stored: rounding may take a value to the bound.
      const float value =
          kernels::ToFloat(fp8 ? Fp8WeightAt(payload, window, index, window.BlockOf(r, c))
                               : WeightAt(payload, index));
      if (std::abs(value) < kernels::kWeightBound) continue;
      return RefuseField("chunk.payload",
                         absl::StrCat(value, " at layer ", chunk.layer(), ", ", name,
                                      window.row + r, ", ", window.column + c, "]"),
                         "finite weights of magnitude below 2^20", "not_finite");
    }
  }
  return absl::OkStatus();
}

absl::Status ParseProjectedChunk(const v1::UploadWeightsRequest::Chunk& chunk,
                                 const ModelSpec& model, int64_t* bytes) {
  if (!model.projected.present()) {
    return RefuseField("chunk.part", v1::WeightPart_Name(chunk.part()),
                       "WEIGHT_PART_UP: the model was registered without q_lora_rank",
                       "no_projected_profile", absl::StatusCode::kFailedPrecondition);
  }
  const WeightWindow window = WindowOf(chunk, model);
  const bool fp8 = IsFp8(chunk);
  if (model.projected.codes() && !fp8) {
    return RefuseField("chunk.dtype", absl::StrCat(static_cast<int>(chunk.dtype())),
                       "DTYPE_F8_E4M3, the model's projected_dtype", "other_dtype",
                       absl::StatusCode::kFailedPrecondition);
  }
  const int64_t scales = fp8 ? window.blocks() * int64_t{sizeof(float)} : 0;
  // Heads, rows and columns are bounded, so this does not overflow.
  *bytes = window.Bytes(fp8 ? kernels::DType::kFp8E4m3 : kernels::DType::kBf16);
  if (*bytes != static_cast<int64_t>(chunk.payload().size())) {
    return RefuseField("chunk.payload", absl::StrCat(chunk.payload().size(), " bytes"),
                       absl::StrCat(*bytes, " bytes, ", scales, " of them scales"), "payload_size");
  }
  return CheckProjectedWeights(chunk, window);
}

}  // namespace

absl::Status ParseWeightsChunk(const v1::UploadWeightsRequest::Chunk& message,
                               const ModelSpec& model, int64_t* bytes) {
  int32_t layer = 0;
  MLA_RETURN_IF_ERROR(Narrow(message.layer(), 0, model.layers - 1, "chunk.layer", &layer));
  MLA_RETURN_IF_ERROR(CheckSlice(message.head_begin(), message.head_count(), 1,
                                 model.geometry.num_heads, "chunk.head_begin", "chunk.head_count"));
  if (!v1::WeightPart_IsValid(message.part())) {
    return RefuseField("chunk.part", absl::StrCat(static_cast<int>(message.part())),
                       "a WeightPart of this version", "unknown_value");
  }
  const bool up = message.part() == v1::WEIGHT_PART_UP;
  const bool bf16 = message.dtype() == v1::DTYPE_UNSPECIFIED || message.dtype() == v1::DTYPE_BF16;
  if (!bf16 && (up || !IsFp8(message))) {
    return RefuseField("chunk.dtype", absl::StrCat(static_cast<int>(message.dtype())),
                       up ? "DTYPE_BF16 for W_UK and W_UV" : "DTYPE_BF16 or DTYPE_F8_E4M3",
                       "unknown_value");
  }
  if (!up) return ParseProjectedChunk(message, model, bytes);
  const kernels::Geometry& g = model.geometry;
  if (!Product(message.head_count(), g.kv_lora_rank, g.nope_dim + g.v_dim,
               int64_t{sizeof(kernels::Bf16)}, bytes) ||
      *bytes != static_cast<int64_t>(message.payload().size())) {
    return RefuseField("chunk.payload", absl::StrCat(message.payload().size(), " bytes"),
                       absl::StrCat(*bytes, " bytes"), "payload_size");
  }
  return CheckWeights(message, g);
}

void ReadProjectedHead(const v1::UploadWeightsRequest::Chunk& chunk, const ModelSpec& model,
                       int32_t head, std::vector<std::byte>* weights) {
  const auto part = chunk.part() == v1::WEIGHT_PART_QUERIES ? kernels::ProjectedPart::kQueries
                                                            : kernels::ProjectedPart::kOutputs;
  const WeightWindow all = WindowOf(chunk, model);
  const WeightWindow own = kernels::WindowOf(model.geometry, model.projected, part,
                                             int64_t{chunk.head_begin()} + head, 1);
  const bool fp8 = IsFp8(chunk), codes = model.projected.codes();
  const std::string& payload = chunk.payload();
  weights->resize(static_cast<size_t>(own.Bytes(model.projected.weights)));
  const int64_t first_row = own.row - all.row, first_column = own.column - all.column;
  for (int64_t r = 0; r < own.rows; ++r) {
    const int64_t begin = (first_row + r) * all.columns + first_column;
    std::byte* const destination = weights->data() + r * own.columns * (codes ? 1 : 2);
    if (codes) {
      std::memcpy(destination, payload.data() + begin, static_cast<size_t>(own.columns));
      std::replace(destination, destination + own.columns, std::byte{kMinusZeroCode}, std::byte{0});
      continue;
    }
    for (int64_t c = 0; c < own.columns; ++c) {
      const kernels::Bf16 weight =
          fp8 ? Fp8WeightAt(payload, all, begin + c, all.BlockOf(first_row + r, first_column + c))
              : WeightAt(payload, begin + c);
      const auto stored = static_cast<kernels::Bf16>(weight == kMinusZero ? 0 : weight);
      std::memcpy(destination + c * int64_t{sizeof(stored)}, &stored, sizeof(stored));
    }
  }
  if (!codes) return;
  // Finds each block of the head in the chunk. Both count from blocks of the whole matrix.
  for (int64_t block = 0; block < own.blocks(); ++block) {
    const int64_t row = own.row / kernels::kScaleBlock + block / own.block_columns();
    const int64_t column = own.column / kernels::kScaleBlock + block % own.block_columns();
    const int64_t in_chunk = (row - all.row / kernels::kScaleBlock) * all.block_columns() + column -
                             all.column / kernels::kScaleBlock;
    const float scale = kernels::ScaleOf(all, payload.data(), in_chunk);
    std::memcpy(weights->data() + own.elements() + block * int64_t{sizeof(scale)}, &scale,
                sizeof(scale));
  }
}

}  // namespace mla::server
