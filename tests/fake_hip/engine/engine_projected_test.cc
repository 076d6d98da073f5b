// Runs PROJECTED through the engine on the GPU backend, and compares its hidden states with those
// of the reference.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/formats/fp8.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/projected_weights.h"
#include "scheduler/engine_types.h"
#include "scheduler/testing/engine_harness.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

using scheduler::testing::EngineHarness;
using scheduler::testing::MakeRow;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;

// Heads of these dims have no expanded form.
constexpr int kHeads = 2, kLora = 512, kRope = 64, kDim = 64, kRowDim = kLora + kRope;
constexpr ProjectedShape kShape{96, 80};
constexpr int kSequences = 2;
// Rows of each sequence. The larger number is that of a full launch.
constexpr int kFewRows = 3, kManyRows = 240;

scheduler::Limits Limits() {
  scheduler::Limits limits = scheduler::testing::TinyLimits();
  limits.default_page_size = 16;
  limits.max_heads = kHeads;
  limits.max_row_dim = kRowDim;
  limits.max_v_dim = kDim;
  limits.max_layers = limits.max_models = 1;
  limits.kv_cache_bytes = 4 << 20;
  limits.max_sequence_rows = 640;
  limits.max_pages_per_sequence = 40;
  limits.max_step_rows = 640;
  limits.launch_rows = kManyRows;
  limits.launch_packed_rows = kManyRows * kHeads;
  limits.prefill_rows = kManyRows;
  limits.weights_bytes = int64_t{4} << 20;
  limits.max_top_k = 1;  // lists would add to the workspace
  return limits;
}

std::vector<Bf16> Weights(uint64_t key, size_t count) {
  std::vector<Bf16> weights;
  for (const float x : MakeRow(key, static_cast<int>(count))) weights.push_back(ToBf16(0.05f * x));
  return weights;
}

class ProjectedEngine {
 public:
  // Uses the reference if `backend` is null.
  ProjectedEngine(std::unique_ptr<AttentionBackend> backend, RopeLayout rope, DType weights) {
    scheduler::testing::HarnessOptions options;
    options.limits = Limits();
    options.model = scheduler::testing::TinyModel();
    options.model.geometry = {kHeads, kLora, kRope, kDim, kDim};
    options.model.layers = 1;
    options.model.softmax_scale = 0.07;
    options.model.projected = kShape;
    options.model.projected.weights = weights;
    options.model.rope = rope;
    options.backend = std::move(backend);
    h_ = std::make_unique<EngineHarness>(std::move(options));
    Upload();
  }

  // Returns the shapes of the registered model, with the type of its weights.
  ProjectedShape projected() const {
    scheduler::ModelTable& models = h_->core().models();
    const auto model = models.Find(h_->core().FindTenant(h_->tenant()), h_->model().id, "model_id");
    return model.ok() ? (*model)->spec->projected : ProjectedShape{};
  }
  // Returns the answers of attends of `rows` new rows each, a sequence each.
  std::vector<std::unique_ptr<TestRequest>> Attend(int rows) {
    std::vector<std::unique_ptr<TestRequest>> requests;
    for (int i = 0; i < kSequences; ++i) requests.push_back(Submit(rows, i));
    for (int quiet = 0; quiet < 3;) {
      const bool started = h_->core().launches().Start();
      const bool completed = h_->core().launches().Complete(/*wait=*/true);
      quiet = started || completed ? 0 : quiet + 1;
    }
    return requests;
  }

 private:
  void Upload() {
    scheduler::ModelTable& models = h_->core().models();
    auto model = models.Find(h_->core().FindTenant(h_->tenant()), h_->model().id, "model_id");
    ASSERT_TRUE(model.ok()) << model.status();
    const std::vector<Bf16> up = Weights(77, size_t{kHeads} * 2 * kDim * kLora);
    ASSERT_TRUE(models.weights().Load(**model, 1, 0, 0, kHeads, std::as_bytes(std::span(up))).ok());
    for (int head = 0; head < kHeads; ++head) {
      for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
        const std::vector<std::byte> bytes = HeadBytes((*model)->spec->projected, part, head);
        const auto load = [&](std::span<const std::byte> weights) {
          return models.weights().LoadProjected(**model, 1, part, 0, head, weights);
        };
        EXPECT_EQ(load(std::span(bytes).subspan(1)).code(), absl::StatusCode::kInvalidArgument);
        const absl::Status s = load(bytes);
        ASSERT_TRUE(s.ok()) << s;
      }
    }
    EXPECT_TRUE(models.weights().Commit(**model, 1).empty());
    CheckRead(**model);
  }

  // The bytes of a head's weights, in the type that the model has.
  std::vector<std::byte> HeadBytes(const ProjectedShape& shape, ProjectedPart part,
                                   int head) const {
    const WeightWindow window = WindowOf(h_->model().geometry, shape, part, head, 1);
    const auto elements = static_cast<size_t>(window.elements());
    std::vector<std::byte> codes(elements);
    const std::vector<Bf16> weights =
        Weights((part == ProjectedPart::kQueries ? 80 : 90) + head, elements);
    constexpr float kScale = 0.0007f;
    for (size_t i = 0; i < elements; ++i) {
      codes[i] = std::byte{EncodeFp8(ToFloat(weights[i]) / kScale, Fp8Kind::kE4m3Fn)};
    }
    if (!shape.codes()) {
      const auto bytes = std::as_bytes(std::span(weights));
      return {bytes.begin(), bytes.end()};
    }
    for (int64_t block = 0; block < window.blocks(); ++block) {
      const auto bytes = std::as_bytes(std::span(&kScale, 1));
      codes.insert(codes.end(), bytes.begin(), bytes.end());
    }
    return codes;
  }

  // Another server gets the weights as this one has them.
  void CheckRead(const scheduler::Model& model) const {
    const scheduler::ModelWeights& held = h_->core().models().weights();
    for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
      const std::vector<std::byte> want = HeadBytes(model.spec->projected, part, 1);
      std::vector<std::byte> got(want.size());
      ASSERT_TRUE(held.ReadProjected(model, part, 0, 1, got).ok());
      EXPECT_EQ(got, want);
    }
  }

  // Each sequence has a stream and a step of its own.
  std::unique_ptr<TestRequest> Submit(int rows, int sequence) {
    const scheduler::StreamId stream = h_->core().steps().OpenStream(h_->tenant());
    const scheduler::SequenceInfo info = h_->Open();
    TestRequest begin;
    begin.kind = scheduler::RequestKind::kBeginStep;
    begin.stream = stream;
    const auto step = static_cast<scheduler::StepId>(sequence + 1);
    begin.step_id = step;
    begin.begin.model_id = h_->model().id;
    begin.begin.sequences = {{info.id, 1, 0, rows}};
    auto rotations = std::make_shared<scheduler::Tail>(size_t(rows) * kRope * sizeof(float),
                                                       scheduler::TenantUse());
    std::vector<float> values;
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < kRope; ++i) {
        const float angle = 0.3f * static_cast<float>(row + sequence) + float(i % (kRope / 2));
        values.push_back(i < kRope / 2 ? std::cos(angle) : std::sin(angle));
      }
    }
    std::memcpy(rotations->data.get(), values.data(), rotations->size);
    begin.begin.rotations = std::move(rotations);
    h_->Submit(&begin);
    EXPECT_TRUE(begin.status.ok()) << begin.status;
    std::vector<Row> kv;
    for (int i = 0; i < rows; ++i) kv.push_back(MakeRow(sequence * 1000 + i, kRowDim));
    auto request = h_->Unsent(stream, step, 0, 0, rows, kv, 0, kHeads, 0);
    request->queries.clear();
    for (int row = 0; row < rows; ++row) {
      for (const float x : MakeRow(50000 + sequence * 1000 + row, kShape.q_lora_rank)) {
        request->queries.push_back(ToBf16(x));
      }
    }
    request->attend.profile = scheduler::Profile::kProjected;
    request->attend.q = reinterpret_cast<const std::byte*>(request->queries.data());
    request->output.assign(size_t(rows) * kShape.hidden_size, NAN);
    request->attend.o = reinterpret_cast<std::byte*>(request->output.data());
    h_->Submit(request.get());
    return request;
  }

  std::unique_ptr<EngineHarness> h_;
};

class EngineProjectedTest : public BackendOnFakeTest {
 protected:
  void Compare(Vendor vendor, RopeLayout rope, int rows, DType weights = DType::kBf16) {
    HipBackendOptions options = Options();
    options.images.push_back(Image("sm_90", kImage90));
    options.vendor = vendor;
    options.watchdog_ms = 600000;
    if (vendor == Vendor::kNvidia) control_->arch = "sm_90";
    auto gpu = HipBackend::Create(options);
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    ProjectedEngine on_gpu(*std::move(gpu), rope, weights), reference(nullptr, rope, weights);
    EXPECT_EQ(on_gpu.projected().weights, weights);
    EXPECT_EQ(reference.projected().weights, weights);
    const auto got = on_gpu.Attend(rows), want = reference.Attend(rows);
    for (int i = 0; i < kSequences; ++i) {
      ASSERT_TRUE(got[i]->answered() && want[i]->answered());
      ASSERT_TRUE(want[i]->status.ok()) << want[i]->status;
      ASSERT_TRUE(got[i]->status.ok()) << got[i]->status;
      ExpectNear(got[i]->output, want[i]->output);
    }
  }
  // Queries are rounded to bf16 before the absorbed product and after it.
  static void ExpectNear(const std::vector<float>& got, const std::vector<float>& want) {
    double both = 0, got_norm = 0, want_norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      both += double{got[i]} * want[i];
      got_norm += double{got[i]} * got[i];
      want_norm += double{want[i]} * want[i];
    }
    ASSERT_GT(want_norm, 0);
    EXPECT_LT(1 - both / std::sqrt(got_norm * want_norm), 1e-4);
  }
};

TEST_F(EngineProjectedTest, HiddenStatesAgreeWithTheReference) {
  for (const Vendor vendor : {Vendor::kAmd, Vendor::kNvidia}) {
    for (const RopeLayout rope : {RopeLayout::kInterleaved, RopeLayout::kHalves}) {
      Compare(vendor, rope, kFewRows);
    }
  }
}

// The reference decodes the codes by other code.
TEST_F(EngineProjectedTest, WeightsOfE4m3AgreeWithTheReference) {
  for (const Vendor vendor : {Vendor::kAmd, Vendor::kNvidia}) {
    Compare(vendor, RopeLayout::kInterleaved, kFewRows, DType::kFp8E4m3);
  }
}

// Queries and outputs between the products need workspace in addition to that of absorbed ones. A
// launch has only as many rows as it has room for.
TEST_F(EngineProjectedTest, LaunchesFitTheWorkspace) {
  Compare(Vendor::kAmd, RopeLayout::kHalves, kManyRows);
}

}  // namespace
}  // namespace mla::kernels::hip
