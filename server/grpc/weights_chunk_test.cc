// Weights of a chunk: which are refused, and how those of the projected profile are read.
#include "server/grpc/weights_chunk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace mla::server {
namespace {

scheduler::ModelSpec Model() {
  scheduler::ModelSpec model;
  model.id = "m";
  model.geometry = {4, 32, 8, 16, 16};
  model.layers = 2;
  model.softmax_scale = 0.5;
  model.page_size = 16;
  return model;
}

// The place of rows of heads 1 and 2 of layer 1 that hold NaN or infinity: W_UK [2, 16, 32], then
// W_UV [2, 32, 16].
TEST(WeightsChunkTest, WeightsThatAreNoNumbers) {
  v1::UploadWeightsRequest::Chunk good;
  good.set_layer(1);
  good.set_head_begin(1);
  good.set_head_count(2);
  good.set_payload(std::string(2 * 32 * (16 + 16) * 2, '<'));
  const auto set = [&good](size_t index, uint16_t bits) {
    v1::UploadWeightsRequest::Chunk changed = good;
    std::memcpy(changed.mutable_payload()->data() + 2 * index, &bits, 2);
    return changed;
  };
  int64_t bytes = 0;
  for (const uint16_t bits : {0x0000, 0x8000, 0x0001, 0x497f, 0xc97f}) {
    EXPECT_TRUE(ParseWeightsChunk(set(5, bits), Model(), &bytes).ok()) << bits;
  }
  struct Case {
    size_t index;
    uint16_t bits;
    const char* got;
  };
  for (const Case& c : {Case{0, 0x7fc0, "nan at layer 1, head 1, W_UK[0, 0]"},
                        Case{512 + 32 + 7, 0x7f80, "inf at layer 1, head 2, W_UK[1, 7]"},
                        Case{1023, 0xff80, "-inf at layer 1, head 2, W_UK[15, 31]"},
                        Case{1024 + 16 + 3, 0x7f81, "nan at layer 1, head 1, W_UV[1, 3]"},
                        Case{2047, 0x4980, "1.04858e+06 at layer 1, head 2, W_UV[31, 15]"}}) {
    EXPECT_EQ(DetailOf(ParseWeightsChunk(set(c.index, c.bits), Model(), &bytes)).field,
              "chunk.payload");
    EXPECT_EQ(DetailOf(ParseWeightsChunk(set(c.index, c.bits), Model(), &bytes)).reason,
              "not_finite");
    EXPECT_EQ(DetailOf(ParseWeightsChunk(set(c.index, c.bits), Model(), &bytes)).got, c.got);
  }
}

// A chunk of three heads has more elements than are checked at a time, and some that are left over.
TEST(WeightsChunkTest, EveryPatternAtEveryPlace) {
  v1::UploadWeightsRequest::Chunk chunk;
  chunk.set_layer(1);
  chunk.set_head_count(3);
  chunk.set_payload(std::string(3 * 32 * (16 + 16) * 2, '\0'));
  const auto accepted = [&chunk](size_t index, uint16_t bits) {
    char* const code = chunk.mutable_payload()->data() + 2 * index;
    std::memcpy(code, &bits, 2);
    int64_t bytes = 0;
    const bool ok = ParseWeightsChunk(chunk, Model(), &bytes).ok();
    std::memset(code, 0, 2);
    return ok;
  };
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bool good = std::abs(kernels::ToFloat(static_cast<uint16_t>(bits))) < 1048576;  // no NaN
    ASSERT_EQ(accepted(bits % 3072, static_cast<uint16_t>(bits)), good) << bits;
  }
  for (size_t index = 0; index < 3072; ++index) {
    ASSERT_TRUE(accepted(index, 0xc97f)) << index;
    ASSERT_FALSE(accepted(index, 0x4980)) << index;
  }
}

void Append(float value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// W_UQ [96, 160] of four heads has blocks of one row and two columns. In the chunk of heads 1 and 2
// all codes are 1.0, and the element at (head 1, row 2, column 130) is 2.0.
TEST(WeightsChunkTest, BlocksScaleTheCodesOfAHead) {
  scheduler::ModelSpec model = Model();
  model.projected = {.q_lora_rank = 160, .hidden_size = 130};
  v1::UploadWeightsRequest::Chunk chunk;
  chunk.set_part(v1::WEIGHT_PART_QUERIES);
  chunk.set_dtype(v1::DTYPE_F8_E4M3);
  chunk.set_head_begin(1);
  chunk.set_head_count(2);
  std::string payload(2 * 24 * 160, '\x38');
  payload[(24 + 2) * 160 + 130] = '\x40';
  Append(0.5f, &payload);
  Append(4.0f, &payload);
  chunk.set_payload(payload);
  int64_t bytes = 0;
  ASSERT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
  EXPECT_EQ(bytes, static_cast<int64_t>(payload.size()));
  std::vector<std::byte> weights;
  const auto value_at = [&weights](size_t index) {
    kernels::Bf16 weight;
    std::memcpy(&weight, &weights[index * sizeof(weight)], sizeof(weight));
    return kernels::ToFloat(weight);
  };
  ReadProjectedHead(chunk, model, 1, &weights);
  ASSERT_EQ(weights.size(), 24u * 160u * 2u);
  EXPECT_EQ(value_at(2 * 160 + 127), 0.5f);
  EXPECT_EQ(value_at(2 * 160 + 128), 4.0f);
  EXPECT_EQ(value_at(2 * 160 + 130), 8.0f);

  // W_O [130, 64]: two blocks of rows and one of columns. The chunk has columns 16 to 47.
  chunk.set_part(v1::WEIGHT_PART_OUTPUTS);
  payload.assign(130 * 32, '\x38');
  payload[129 * 32 + 17] = '\x40';
  Append(0.25f, &payload);
  Append(2.0f, &payload);
  chunk.set_payload(payload);
  ASSERT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
  ReadProjectedHead(chunk, model, 1, &weights);
  ASSERT_EQ(weights.size(), 130u * 16u * 2u);
  EXPECT_EQ(value_at(127 * 16), 0.25f);
  EXPECT_EQ(value_at(129 * 16 + 1), 4.0f);
  chunk.mutable_payload()->pop_back();
  EXPECT_EQ(DetailOf(ParseWeightsChunk(chunk, model, &bytes)).reason, "payload_size");
}

// W_UQ [192, 160] and W_O [130, 256] of a model that holds codes. Heads of W_UQ begin 48 rows
// apart: head 2 ends in the second block, where the chunk has scales of its own.
TEST(WeightsChunkTest, AModelOfE4m3GetsCodesAndTheScalesOfItsHeads) {
  scheduler::ModelSpec model = Model();
  model.geometry = {4, 32, 16, 32, 64};
  model.projected = {160, 130, kernels::DType::kFp8E4m3};
  v1::UploadWeightsRequest::Chunk chunk;
  chunk.set_part(v1::WEIGHT_PART_QUERIES);
  chunk.set_dtype(v1::DTYPE_F8_E4M3);
  chunk.set_head_begin(1);
  chunk.set_head_count(2);  // rows 48 to 143
  std::string payload(2 * 48 * 160, '\x38');
  payload[(48 + 2) * 160 + 130] = '\x40';
  payload[(48 + 2) * 160 + 131] = '\x80';  // -0 becomes 0
  for (const float scale : {0.5f, 4.0f, 0.25f, 8.0f}) Append(scale, &payload);
  chunk.set_payload(payload);
  int64_t bytes = 0;
  ASSERT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
  std::vector<std::byte> head;
  ReadProjectedHead(chunk, model, 0, &head);  // rows 48 to 95, in the first block alone
  ASSERT_EQ(head.size(), 48u * 160u + 2u * 4u);
  ASSERT_EQ(static_cast<int64_t>(head.size()),
            model.head_bytes(kernels::ProjectedPart::kQueries, 1));
  const auto scale = [&head](size_t elements, size_t block) {
    float value;
    std::memcpy(&value, &head[elements + block * sizeof(value)], sizeof(value));
    return value;
  };
  EXPECT_EQ(scale(48 * 160, 0), 0.5f);
  EXPECT_EQ(scale(48 * 160, 1), 4.0f);
  ReadProjectedHead(chunk, model, 1, &head);  // rows 96 to 143
  ASSERT_EQ(head.size(), 48u * 160u + 4u * 4u);
  EXPECT_EQ(head[2 * 160 + 129], std::byte{0x38});
  EXPECT_EQ(head[2 * 160 + 130], std::byte{0x40});
  EXPECT_EQ(head[2 * 160 + 131], std::byte{0});
  EXPECT_EQ(scale(48 * 160, 0), 0.5f);
  EXPECT_EQ(scale(48 * 160, 2), 0.25f);
  EXPECT_EQ(scale(48 * 160, 3), 8.0f);

  // The chunk has columns 64 to 191, in both blocks of columns.
  chunk.set_part(v1::WEIGHT_PART_OUTPUTS);
  payload.assign(130 * 128, '\x38');
  payload[129 * 128 + 64] = '\x40';
  for (const float of_block : {0.5f, 4.0f, 0.25f, 8.0f}) Append(of_block, &payload);
  chunk.set_payload(payload);
  ASSERT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
  ReadProjectedHead(chunk, model, 1, &head);
  ASSERT_EQ(head.size(), 130u * 64u + 2u * 4u);
  EXPECT_EQ(head[129 * 64], std::byte{0x40});
  EXPECT_EQ(scale(130 * 64, 0), 4.0f);
  EXPECT_EQ(scale(130 * 64, 1), 8.0f);

  chunk.set_dtype(v1::DTYPE_BF16);
  chunk.set_payload(std::string(130 * 128 * 2, '\0'));
  EXPECT_EQ(DetailOf(ParseWeightsChunk(chunk, model, &bytes)).field, "chunk.dtype");
  EXPECT_EQ(DetailOf(ParseWeightsChunk(chunk, model, &bytes)).reason, "other_dtype");
  model.projected.weights = kernels::DType::kBf16;
  EXPECT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
}

// A model of codes may hand its codes over to a server that holds bf16, and an older server its
// weights of bf16. The worker's repeat must then equal what came, so -0 is 0 in all of them.
TEST(WeightsChunkTest, MinusZeroIsZeroInEveryTypeOfProjectedWeights) {
  scheduler::ModelSpec model = Model();
  model.geometry = {4, 32, 16, 32, 64};
  v1::UploadWeightsRequest::Chunk codes, wide;
  codes.set_head_count(1);
  codes.set_dtype(v1::DTYPE_F8_E4M3);
  codes.set_part(v1::WEIGHT_PART_QUERIES);
  wide = codes;
  wide.set_dtype(v1::DTYPE_BF16);
  std::string payload(48 * 160, '\x38');  // codes of 1.0
  payload[1] = '\x80';
  payload[130] = '\xb8';  // -1.0, times a scale of 0
  for (const float scale : {1.0f, 0.0f}) Append(scale, &payload);
  codes.set_payload(payload);
  std::vector<kernels::Bf16> weights(48 * 160, 0x3f80);
  weights[1] = weights[130] = 0x8000;
  for (size_t c = 128; c < weights.size(); ++c) {
    if (c % 160 >= 128 && c != 130) weights[c] = 0;
  }
  wide.set_payload(std::string(reinterpret_cast<const char*>(weights.data()), 2 * weights.size()));
  weights[1] = weights[130] = 0;
  std::vector<std::byte> want(2 * weights.size());
  std::memcpy(want.data(), weights.data(), want.size());
  for (const auto& chunk : {codes, wide}) {
    model.projected = {160, 130, kernels::DType::kBf16};
    int64_t bytes = 0;
    ASSERT_EQ(ParseWeightsChunk(chunk, model, &bytes), absl::OkStatus());
    std::vector<std::byte> head;
    ReadProjectedHead(chunk, model, 0, &head);
    EXPECT_TRUE(head == want) << chunk.dtype();
  }
}

// Weights are stored as bf16, and must then be below the bound too: another server gets them so.
TEST(WeightsChunkTest, BlocksAreBoundedAsTheyAreStored) {
  scheduler::ModelSpec model = Model();
  model.projected = {.q_lora_rank = 128, .hidden_size = 128};
  v1::UploadWeightsRequest::Chunk chunk;
  chunk.set_part(v1::WEIGHT_PART_QUERIES);
  chunk.set_dtype(v1::DTYPE_F8_E4M3);
  chunk.set_head_count(1);
  int64_t bytes = 0;
  for (const auto& [scale, good] : {std::pair(1044480.0f, true), std::pair(1048575.0f, false)}) {
    std::string payload(24 * 128, '\x38');  // codes of 1.0
    Append(scale, &payload);
    chunk.set_payload(payload);
    EXPECT_EQ(ParseWeightsChunk(chunk, model, &bytes).ok(), good) << scale;
  }
  EXPECT_EQ(DetailOf(ParseWeightsChunk(chunk, model, &bytes)).reason, "not_finite");
}

}  // namespace
}  // namespace mla::server
