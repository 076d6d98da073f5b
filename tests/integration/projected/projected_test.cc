// PROFILE_PROJECTED from end to end: every backend in host memory and every transport, against the
// attention layer in double precision; and the errors of what does not fit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "client/cpp/streams/errors.h"
#include "tests/integration/projected/projected_model.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;

constexpr double kBf16Distance = 1e-5;
// Rows and weights are bf16 here, so fp32 results differ by sums alone.
constexpr double kF32Distance = 1e-8;

// Returns the bound for results of the server that `info` describes. On processors of the levels
// avx512_bf16 and amx, the expanded form rounds queries and weights of the softmax to bf16.
double MostDistance(v1::DType dtype, const v1::GetServerInfoReply& info) {
  if (dtype != v1::DTYPE_F32) return kBf16Distance;
  for (const v1::Backend& backend : info.backends()) {
    if (!backend.chosen()) continue;
    if (backend.arch() == "avx512_bf16" || backend.arch() == "amx") return kBf16Distance;
  }
  return kF32Distance;
}

std::function<void(server::Config&)> On(const std::string& backend) {
  return [backend](server::Config& config) { config.backend = backend; };
}

client::ClientOptions Over(Transport transport) {
  client::ClientOptions options;
  options.transport = transport;
  return options;
}

v1::ErrorDetail DetailOf(const absl::Status& status) {
  return client::DetailOf(status).value_or(v1::ErrorDetail());
}

class ProjectedTest : public testing::TestWithParam<std::tuple<const char*, Transport>> {};

TEST_P(ProjectedTest, AgreesWithDoublePrecision) {
  const auto& [backend, transport] = GetParam();
  const TestServer server(On(backend));
  const auto client = server.Connect(Over(transport));
  for (const v1::DType dtype : {v1::DTYPE_BF16, v1::DTYPE_F32}) {
    for (const v1::RopeLayout rope : {v1::ROPE_LAYOUT_INTERLEAVED, v1::ROPE_LAYOUT_HALVES}) {
      ProjectedDims dims;
      dims.rope = rope;
      const std::string id = v1::RopeLayout_Name(rope) + v1::DType_Name(dtype);
      ProjectedWorker worker(client.get(), dims, id, 1);
      ASSERT_EQ(worker.Upload(/*fp8=*/false), absl::OkStatus());
      ProjectedTrack a = *worker.Open(), b = *worker.Open();
      double worst = 0;
      // 40 rows take the expanded form on the CPU backend, the others the absorbed one.
      ASSERT_EQ(worker.Step({&a, &b}, {40, 3}, dtype, &worst), absl::OkStatus());
      ASSERT_EQ(worker.Step({&b, &a}, {1, 1}, dtype, &worst), absl::OkStatus());
      ASSERT_EQ(worker.Step({&a}, {4}, dtype, &worst, {2}), absl::OkStatus());
      ASSERT_EQ(worker.Step({&a, &b}, {1, 1}, dtype, &worst), absl::OkStatus());
      EXPECT_LT(worst, MostDistance(dtype, client->info()));
      if (dtype == v1::DTYPE_BF16) {
        EXPECT_GT(worst, 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, ProjectedTest,
                         testing::Combine(testing::Values("cpu", "reference"),
                                          testing::Values(Transport::kInline, Transport::kShm,
                                                          Transport::kRing)));

// Blocks of 128 x 128 begin and end inside of heads.
TEST(ProjectedWeightsTest, ScalesOfBlocksAreApplied) {
  const TestServer server(On("cpu"));
  const auto client = server.Connect();
  ProjectedDims dims;
  dims.q_lora = 140;
  dims.hidden = 150;
  dims.dims.heads = 9;  // 216 rows of W_UQ, 144 columns of W_O
  ProjectedWorker worker(client.get(), dims, "fp8", 2);
  ASSERT_EQ(worker.Upload(/*fp8=*/true), absl::OkStatus());
  ProjectedTrack track = *worker.Open();
  double worst = 0;
  ASSERT_EQ(worker.Step({&track}, {9}, v1::DTYPE_BF16, &worst), absl::OkStatus());
  ASSERT_EQ(worker.Step({&track}, {1}, v1::DTYPE_BF16, &worst), absl::OkStatus());
  EXPECT_LT(worst, kBf16Distance);
}

// The reference holds codes as they are, and the CPU backend the weights that they stand for: the
// model says so, and both compute the same hidden states.
TEST(ProjectedWeightsTest, AModelOfE4m3IsHeldAsTheBackendCan) {
  for (const std::string backend : {"cpu", "reference"}) {
    const bool holds = backend == "reference";
    const TestServer server(On(backend));
    const auto client = server.Connect();
    const v1::DType held = holds ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
    const auto& offered = client->info().capabilities();
    EXPECT_EQ(std::count(offered.begin(), offered.end(), "projected_e4m3"), holds ? 1 : 0);
    ProjectedDims dims;
    dims.q_lora = 140;
    dims.hidden = 150;
    dims.dims.heads = 5;
    dims.dims.nope = 40;
    dims.dims.v = 64;
    dims.weights = v1::DTYPE_F8_E4M3;
    const auto registered = client->RegisterModel(SpecOf(dims, "m"));
    ASSERT_TRUE(registered.ok()) << registered.status();
    EXPECT_EQ(registered->model().projected_dtype(), held);
    ProjectedWorker worker(client.get(), dims, "m", 2);
    ASSERT_EQ(worker.Upload(/*fp8=*/true), absl::OkStatus());
    ProjectedTrack track = *worker.Open();
    double worst = 0;
    ASSERT_EQ(worker.Step({&track}, {9}, v1::DTYPE_BF16, &worst), absl::OkStatus());
    ASSERT_EQ(worker.Step({&track}, {1}, v1::DTYPE_BF16, &worst), absl::OkStatus());
    EXPECT_LT(worst, kBf16Distance) << backend;
    // The same weights as bf16: a repeat where they are held so.
    const absl::Status mixed = worker.Upload(/*fp8=*/false);
    EXPECT_EQ(DetailOf(mixed).reason(), holds ? "other_dtype" : "") << mixed;
    EXPECT_EQ(DetailOf(mixed).field(), holds ? "chunk.dtype" : "") << mixed;
  }
}

// The chunk of a part of the heads has the scales of the blocks that it touches.
TEST(ProjectedWeightsTest, PartsOfHeadsMayComeOneByOne) {
  const TestServer server(On("cpu"));
  const auto client = server.Connect();
  ProjectedDims dims;
  dims.q_lora = 140;
  dims.hidden = 150;
  dims.dims.heads = 9;
  ProjectedWorker worker(client.get(), dims, "m", 3);
  ASSERT_EQ(worker.Upload(/*fp8=*/true), absl::OkStatus());
  // The same weights again, three heads a chunk: equal bytes are accepted, so they were read alike.
  std::mt19937_64 random(3);
  ProjectedWeights weights = RandomProjectedWeights(dims, &random);
  const auto whole = ProjectedChunks(dims, 0, 9, true, &weights);
  const auto upload = [&](std::vector<client::WeightsChunk> chunks) {
    size_t next = 0;
    return client
        ->UploadWeights("m",
                        [&]() -> std::optional<client::WeightsChunk> {
                          if (next == chunks.size()) return std::nullopt;
                          return chunks[next++];
                        })
        .status();
  };
  EXPECT_EQ(upload(whole), absl::OkStatus());
  for (int head = 0; head < 9; head += 3) {
    // As bf16, which is what the codes stand for.
    ProjectedWeights exact = weights;
    EXPECT_EQ(upload(ProjectedChunks(dims, head, head + 3, false, &exact)), absl::OkStatus());
  }
  weights.wo[1][5] ^= 1;
  const absl::Status other = upload(ProjectedChunks(dims, 0, 1, false, &weights));
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(DetailOf(other).reason(), "weights_differ");
}

class ProjectedRefusalTest : public testing::Test {
 protected:
  absl::Status Upload(client::WeightsChunk chunk) {
    bool sent = false;
    return client_
        ->UploadWeights("m",
                        [&]() -> std::optional<client::WeightsChunk> {
                          if (std::exchange(sent, true)) return std::nullopt;
                          return chunk;
                        })
        .status();
  }
  absl::Status Register(const std::function<void(v1::ModelSpec*)>& change) {
    v1::ModelSpec spec = SpecOf(dims_, "other");
    change(&spec);
    return client_->RegisterModel(spec).status();
  }
  std::vector<client::WeightsChunk> Chunks(bool fp8) {
    std::mt19937_64 random(1);
    ProjectedWeights weights = RandomProjectedWeights(dims_, &random);
    return ProjectedChunks(dims_, 0, dims_.dims.heads, fp8, &weights);
  }
  static void SetFloat(std::string* bytes, size_t from_end, float value) {
    std::memcpy(bytes->data() + bytes->size() - from_end, &value, sizeof(value));
  }

  const TestServer server_{On("cpu")};
  const std::unique_ptr<client::Client> client_ = server_.Connect();
  const ProjectedDims dims_;
  ProjectedWorker worker_{client_.get(), dims_, "m", 1};
};

TEST_F(ProjectedRefusalTest, ShapesThatDisagree) {
  const struct {
    std::function<void(v1::ModelSpec*)> change;
    const char* field;
  } cases[] = {
      {[](auto* s) { s->set_q_lora_rank(0); }, "model.q_lora_rank"},
      {[](auto* s) { s->set_projected_dtype(v1::DTYPE_F32); }, "model.projected_dtype"},
      {[](auto* s) { s->set_projected_dtype(v1::DTYPE_F8_E4M3); }, "model.projected_dtype"},
      {[](auto* s) { s->set_q_lora_rank(1 << 20); }, "model.q_lora_rank"},
      {[](auto* s) { s->set_hidden_size(0); }, "model.hidden_size"},
      {[](auto* s) { s->set_hidden_size(~0u); }, "model.hidden_size"},
      {[](auto* s) { s->set_rope_layout(v1::ROPE_LAYOUT_UNSPECIFIED); }, "model.rope_layout"},
      {[](auto* s) { s->set_rope_layout(static_cast<v1::RopeLayout>(7)); }, "model.rope_layout"},
      {[](auto* s) { s->set_rope_owner(v1::ROPE_OWNER_WORKER); }, "model.q_lora_rank"},
      {[](auto* s) { s->set_rope_owner(v1::ROPE_OWNER_UNSPECIFIED); }, "model.rope_owner"},
      {[](auto* s) { s->mutable_geometry()->set_rope_dim(7); }, "model.geometry.rope_dim"},
      {[](auto* s) {
         s->mutable_geometry()->set_nope_dim(0);
         s->mutable_geometry()->set_v_dim(0);
       },
       "model.geometry.nope_dim"},
  };
  for (const auto& c : cases) {
    const absl::Status status = Register(c.change);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << status;
    EXPECT_EQ(DetailOf(status).field(), c.field);
  }
}

TEST_F(ProjectedRefusalTest, WeightsThatDoNotFit) {
  const float inf = std::numeric_limits<float>::infinity();
  client::WeightsChunk chunk = Chunks(false)[0];
  chunk.bytes.pop_back();
  EXPECT_EQ(DetailOf(Upload(chunk)).field(), "chunk.payload");
  chunk = Chunks(false)[1];
  chunk.bytes[1] = 0x7f;  // 0x7f.. is NaN or as good as infinite
  EXPECT_EQ(DetailOf(Upload(chunk)).reason(), "not_finite");
  chunk = Chunks(true)[0];
  for (const float scale : {inf, -1.0f, std::nanf(""), 1e38f}) {
    SetFloat(&chunk.bytes, sizeof(float), scale);
    const absl::Status status = Upload(chunk);
    EXPECT_EQ(DetailOf(status).field(), "chunk.payload") << scale;
    EXPECT_EQ(DetailOf(status).reason(), "bad_scale") << scale;
  }
  chunk = Chunks(true)[1];
  chunk.bytes[3] = 0x7f;  // NaN
  EXPECT_EQ(DetailOf(Upload(chunk)).reason(), "not_finite");
  chunk = Chunks(true)[1];
  chunk.dtype = v1::DTYPE_F32;
  EXPECT_EQ(DetailOf(Upload(chunk)).field(), "chunk.dtype");
  chunk.part = static_cast<v1::WeightPart>(9);
  EXPECT_EQ(DetailOf(Upload(chunk)).field(), "chunk.part");
  chunk = Chunks(false)[0];
  chunk.head_count += 1;
  EXPECT_EQ(DetailOf(Upload(chunk)).field(), "chunk.head_count");
  // A model without the profile has no such weights.
  ASSERT_TRUE(client_->RegisterModel(SpecOf(dims_.dims, "plain")).ok());
  chunk = Chunks(false)[0];
  bool sent = false;
  const auto status = client_->UploadWeights("plain", [&]() -> std::optional<client::WeightsChunk> {
    if (std::exchange(sent, true)) return std::nullopt;
    return chunk;
  });
  EXPECT_EQ(status.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(status.status()).field(), "chunk.part");
}

TEST_F(ProjectedRefusalTest, StepsWithoutWhatTheyNeed) {
  ProjectedTrack track = *worker_.Open();
  const auto begin = [&](std::span<const float> rotations) {
    client::BeginOptions options;
    options.rotations = rotations;
    return worker_.session().Begin("m", {{&track.sequence, 2}}, options);
  };
  std::vector<float> rotations = worker_.Rotations(2);
  const size_t row = static_cast<size_t>(dims_.dims.row());
  const std::vector<uint16_t> kv(2 * row), q(2 * static_cast<size_t>(dims_.q_lora));
  std::vector<uint16_t> out(2 * static_cast<size_t>(dims_.hidden));
  const auto attend = [&](client::Step* step, v1::Profile profile, uint32_t heads) {
    client::AttendCall call;
    call.row_count = 2;
    call.num_heads = heads;
    call.profile = profile;
    call.kv = kv.data();
    call.q = q.data();
    call.o = out.data();
    return step->Attend(call).status();
  };
  const auto heads = static_cast<uint32_t>(dims_.dims.heads);
  {
    auto step = begin({});
    ASSERT_TRUE(step.ok());
    EXPECT_EQ(DetailOf(attend(step->get(), v1::PROFILE_PROJECTED, heads)).reason(),
              "rotations_missing");
  }
  auto step = begin(rotations);
  ASSERT_TRUE(step.ok()) << step.status();
  absl::Status status = attend(step->get(), v1::PROFILE_PROJECTED, heads);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(status).reason(), "weights_missing");
  EXPECT_EQ(DetailOf(attend(step->get(), v1::PROFILE_PROJECTED, heads - 1)).field(),
            "attend.num_heads");
  step = absl::CancelledError();
  ASSERT_EQ(worker_.Upload(false), absl::OkStatus());
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf(""), 1025.0f}) {
    std::vector<float> spoiled = rotations;
    spoiled[9] = bad;
    status = begin(spoiled).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailOf(status).field(), "begin_step.rotations[9]");
  }
  step = begin(rotations);
  ASSERT_TRUE(step.ok());
  EXPECT_EQ(attend(step->get(), v1::PROFILE_PROJECTED, heads), absl::OkStatus());
}

TEST_F(ProjectedRefusalTest, RotationsOfTheWrongSizeOrModel) {
  ASSERT_TRUE(client_->RegisterModel(SpecOf(dims_.dims, "plain")).ok());
  auto sequence = client_->OpenSequence("plain");
  ASSERT_TRUE(sequence.ok());
  const std::vector<float> rotations = worker_.Rotations(1);
  client::BeginOptions options;
  options.rotations = rotations;
  const absl::Status status = worker_.session().Begin("plain", {{&*sequence, 1}}, options).status();
  EXPECT_EQ(DetailOf(status).reason(), "no_rotations_here");
  ProjectedTrack track = *worker_.Open();
  EXPECT_EQ(worker_.session().Begin("m", {{&track.sequence, 2}}, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A value that is not finite makes its row NaN, and other rows stay as they are.
TEST_F(ProjectedRefusalTest, QueriesThatAreNotFinite) {
  ASSERT_EQ(worker_.Upload(false), absl::OkStatus());
  ProjectedTrack track = *worker_.Open();
  const std::vector<float> rotations = worker_.Rotations(2);
  client::BeginOptions options;
  options.rotations = rotations;
  auto step = worker_.session().Begin("m", {{&track.sequence, 2}}, options);
  ASSERT_TRUE(step.ok());
  const auto hidden = static_cast<size_t>(dims_.hidden);
  std::vector<uint16_t> kv(2 * static_cast<size_t>(dims_.dims.row()), ToBf16(0.5f));
  std::vector<uint16_t> q(2 * static_cast<size_t>(dims_.q_lora), ToBf16(0.5f));
  q.back() = 0x7f80;  // infinity
  std::vector<uint16_t> out(2 * hidden);
  client::AttendCall call;
  call.row_count = 2;
  call.num_heads = static_cast<uint32_t>(dims_.dims.heads);
  call.profile = v1::PROFILE_PROJECTED;
  call.kv = kv.data();
  call.q = q.data();
  call.o = out.data();
  ASSERT_TRUE((*step)->Attend(call).ok());
  for (size_t i = 0; i < hidden; ++i) {
    EXPECT_TRUE(std::isfinite(FromBf16(out[i])));
    EXPECT_TRUE(std::isnan(FromBf16(out[hidden + i])));
  }
}

// Other profiles bring queries that the worker has rotated, which the model says it does not do.
TEST_F(ProjectedRefusalTest, QueriesOfOtherProfiles) {
  ASSERT_EQ(worker_.Upload(false), absl::OkStatus());
  ProjectedTrack track = *worker_.Open();
  const std::vector<float> rotations = worker_.Rotations(1);
  client::BeginOptions options;
  options.rotations = rotations;
  auto step = worker_.session().Begin("m", {{&track.sequence, 1}}, options);
  ASSERT_TRUE(step.ok());
  const std::vector<uint16_t> rows(4096);
  std::vector<uint16_t> out(4096);
  client::AttendCall call;
  call.row_count = 1;
  call.num_heads = static_cast<uint32_t>(dims_.dims.heads);
  call.kv = call.q = rows.data();
  call.o = out.data();
  for (const v1::Profile profile : {v1::PROFILE_EXPANDED, v1::PROFILE_ABSORBED}) {
    call.profile = profile;
    const absl::Status status = (*step)->Attend(call).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailOf(status).reason(), "queries_projected");
  }
  call.profile = v1::PROFILE_PROJECTED;
  call.q_dtype = v1::DTYPE_F8_E4M3;
  EXPECT_EQ(DetailOf((*step)->Attend(call).status()).field(), "attend.q_dtype");
}

}  // namespace
}  // namespace mla::integration
