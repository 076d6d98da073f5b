// PROFILE_PROJECTED through the C library.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <span>
#include <vector>

#include "client/c/mla_client.h"
#include "tests/integration/projected/projected_model.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr double kBf16Distance = 1e-5;

// Blocks of 128 x 128 begin and end inside of heads.
ProjectedDims BlockDims() {
  ProjectedDims dims;
  dims.q_lora = 140;
  dims.hidden = 150;
  dims.dims.heads = 9;
  dims.dims.layers = 1;
  return dims;
}

class CProjectedTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(mla_connect(server_.unix_target().c_str(), nullptr, &client_, nullptr), MLA_OK);
    mla_model model{};
    model.struct_size = sizeof(model);
    model.model_id = "c";
    model.num_heads = 9;
    model.kv_lora_rank = 32;
    model.rope_dim = 8;
    model.nope_dim = model.v_dim = 16;
    model.layers = 1;
    model.softmax_scale = dims_.dims.scale;
    model.q_lora_rank = 140;
    model.hidden_size = 150;
    model.rope_layout = MLA_ROPE_LAYOUT_HALVES;
    ASSERT_EQ(mla_register_model(client_, &model, nullptr, nullptr), MLA_OK);
  }
  void TearDown() override { mla_client_free(client_); }

  mla_code UploadUp() {
    const Weights& up = worker_.weights().up;
    const mla_weights weights{0, 0, 9, up.uk[0].data(), up.uv[0].data()};
    return mla_upload_weights(client_, "c", &weights, 1, nullptr, nullptr);
  }
  static mla_projected_weights Projected() {
    mla_projected_weights weights{};
    weights.struct_size = sizeof(weights);
    weights.head_count = 9;
    return weights;
  }

  const TestServer server_{[](server::Config& config) {
    config.backend = "cpu";
    config.wire.weight_chunk_bytes = 65536;  // several chunks
  }};
  const std::unique_ptr<client::Client> other_ = server_.Connect();
  const ProjectedDims dims_ = BlockDims();
  // Its weights and rotations are used; it registers a model of its own.
  ProjectedWorker worker_{other_.get(), dims_, "cpp", 5};
  mla_client* client_ = nullptr;
};

// The server refuses codes of such heads, so it has got the field; it is on a CPU and holds bf16.
TEST_F(CProjectedTest, TheTypeOfWeightsIsRegistered) {
  mla_model model{};
  model.struct_size = sizeof(model);
  model.model_id = "codes";
  model.num_heads = 2;
  model.kv_lora_rank = 32;
  model.rope_dim = model.nope_dim = 8;
  model.v_dim = 16;
  model.layers = 1;
  model.softmax_scale = 1.0;
  model.q_lora_rank = model.hidden_size = 32;
  model.rope_layout = MLA_ROPE_LAYOUT_HALVES;
  model.projected_e4m3 = 1;
  EXPECT_EQ(mla_register_model(client_, &model, nullptr, nullptr), MLA_INVALID_ARGUMENT);
  model.v_dim = 64;
  EXPECT_EQ(mla_register_model(client_, &model, nullptr, nullptr), MLA_OK);
}

TEST_F(CProjectedTest, AStepAgreesWithDoublePrecision) {
  ASSERT_EQ(UploadUp(), MLA_OK);
  mla_projected_weights weights = Projected();
  weights.w_uq = worker_.weights().uq[0].data();
  weights.w_o = worker_.weights().wo[0].data();
  int32_t complete = 0;
  ASSERT_EQ(mla_upload_projected(client_, "c", &weights, &complete, nullptr), MLA_OK);
  EXPECT_EQ(complete, 1);
  mla_sequence* sequence = nullptr;
  mla_session* session = nullptr;
  ASSERT_EQ(mla_sequence_open(client_, "c", nullptr, &sequence, nullptr), MLA_OK);
  ASSERT_EQ(mla_session_open(client_, &session, nullptr), MLA_OK);
  const std::vector<float> rotations = worker_.Rotations(3);
  mla_step_options options{};
  options.struct_size = sizeof(options);
  options.rotations = rotations.data();
  options.rotation_count = rotations.size();
  const mla_step_rows rows{sequence, 3};
  mla_step* step = nullptr;
  ASSERT_EQ(mla_step_begin(session, "c", &rows, 1, &options, &step, nullptr), MLA_OK);
  std::mt19937_64 random(1);
  const std::vector<uint16_t> kv = RandomBf16(3 * 40, &random), q = RandomBf16(3 * 140, &random);
  std::vector<uint16_t> hidden(3 * 150);
  mla_attend call{};
  call.struct_size = sizeof(call);
  call.row_count = 3;
  call.num_heads = 9;
  call.profile = MLA_PROFILE_PROJECTED;
  call.kv = kv.data();
  call.q = q.data();
  call.o = hidden.data();
  ASSERT_EQ(mla_step_attend(step, &call, nullptr, nullptr), MLA_OK);
  for (size_t row = 0; row < 3; ++row) {
    const std::vector<double> want =
        worker_.Hidden(0, kv, static_cast<int>(row), std::span(q).subspan(row * 140, 140),
                       std::span(rotations).subspan(row * 8, 8));
    EXPECT_LT(CosineDistance(want, &hidden[row * 150], v1::DTYPE_BF16), kBf16Distance);
  }
  EXPECT_EQ(mla_step_end(step, nullptr, nullptr), MLA_OK);
  mla_step_free(step);
  mla_session_free(session);
  mla_sequence_free(sequence);
}

// Codes with scales stand for the weights that they were made from.
TEST_F(CProjectedTest, CodesWithScalesAreTheSameWeights) {
  std::mt19937_64 random(7);
  std::vector<uint16_t> uq = worker_.weights().uq[0], wo = worker_.weights().wo[0];
  const Fp8Matrix queries = Quantize(9 * 24, 140, &random, &uq);
  const Fp8Matrix outputs = Quantize(150, 9 * 16, &random, &wo);
  mla_projected_weights weights = Projected();
  weights.w_uq = queries.codes.data();
  weights.w_o = outputs.codes.data();
  weights.w_uq_scales = queries.scales.data();
  weights.w_o_scales = outputs.scales.data();
  ASSERT_EQ(mla_upload_projected(client_, "c", &weights, nullptr, nullptr), MLA_OK);
  mla_projected_weights exact = Projected();
  exact.w_uq = uq.data();
  exact.w_o = wo.data();
  EXPECT_EQ(mla_upload_projected(client_, "c", &exact, nullptr, nullptr), MLA_OK);
  wo[1] ^= 1;
  EXPECT_EQ(mla_upload_projected(client_, "c", &exact, nullptr, nullptr), MLA_ALREADY_EXISTS);
}

TEST_F(CProjectedTest, RefusesWhatItCouldNotRead) {
  mla_projected_weights weights = Projected();
  const auto refused = [&](const char* field) {
    mla_error* error = nullptr;
    EXPECT_EQ(mla_upload_projected(client_, "c", &weights, nullptr, &error), MLA_INVALID_ARGUMENT);
    EXPECT_STREQ(mla_error_field(error), field);
    mla_error_free(error);
  };
  refused("weights.w_uq");
  weights.w_uq = worker_.weights().uq[0].data();
  refused("weights.w_o");
  weights.w_o = worker_.weights().wo[0].data();
  const float scale = 1;
  weights.w_uq_scales = &scale;
  refused("weights.w_o_scales");
  weights.w_uq_scales = nullptr;
  for (const uint32_t count : {0u, 10u, ~0u}) {
    weights.head_count = count;
    refused("weights.head_count");
  }
}

}  // namespace
}  // namespace mla::integration
