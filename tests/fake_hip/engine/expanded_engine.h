// An engine whose clients use the EXPANDED profile, on any backend and driven by hand. A test can
// run the same script on two of them and compare the results.
#ifndef MLA_TESTS_FAKE_HIP_ENGINE_EXPANDED_ENGINE_H_
#define MLA_TESTS_FAKE_HIP_ENGINE_EXPANDED_ENGINE_H_

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/types/round_info.h"
#include "scheduler/testing/engine_harness.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {

// Requests with at least this many rows take the expanded form on the GPU: for heads of 128/128
// dims, and of 192/256.
inline constexpr int kExpandedFormRows = 129, kExpandedFormRowsWide = 299;

class ExpandedEngine {
 public:
  static constexpr int kLora = 512;
  static constexpr int kRope = 64;
  static constexpr int kDim = 128;  // nope_dim and v_dim
  static constexpr int kRowDim = kLora + kRope;
  using TestRequest = scheduler::testing::TestRequest;
  using Row = scheduler::testing::Row;

  static scheduler::Limits Limits(int heads = 2) {
    scheduler::Limits limits = scheduler::testing::TinyLimits();
    limits.default_page_size = 16;
    limits.max_heads = heads;
    limits.max_row_dim = kRowDim;
    limits.max_v_dim = kDim;
    limits.max_layers = limits.max_models = 1;
    limits.weights_bytes = heads * (int64_t{2} * kDim * kLora * 2);
    limits.kv_cache_bytes = 4 << 20;
    limits.max_sequence_rows = 640;
    limits.max_pages_per_sequence = 40;
    limits.max_step_rows = 640;
    limits.launch_rows = 256;
    limits.launch_packed_rows = 256 * heads;
    limits.prefill_rows = 160;
    return limits;
  }

  // Uses the reference if `backend` is null. If `upload` is false, the caller uploads the weights.
  explicit ExpandedEngine(std::unique_ptr<AttentionBackend> backend, bool upload = true)
      : ExpandedEngine(std::move(backend), 2, Limits(), upload) {}
  ExpandedEngine(std::unique_ptr<AttentionBackend> backend, int heads,
                 const scheduler::Limits& limits, bool upload = true,
                 const ExpandedDims& dims = kDims128)
      : heads_(heads), dims_(dims) {
    scheduler::testing::HarnessOptions options;
    options.limits = limits;
    options.model = scheduler::testing::TinyModel();
    options.model.geometry = {heads, kLora, kRope, dims.nope, dims.value};
    options.model.layers = 1;
    options.model.softmax_scale = 0.07;
    options.backend = std::move(backend);
    h_ = std::make_unique<scheduler::testing::EngineHarness>(std::move(options));
    stream_ = h_->core().steps().OpenStream(h_->tenant());
    if (upload) {
      EXPECT_TRUE(Upload(1).ok());
    }
  }

  scheduler::testing::EngineHarness& harness() { return *h_; }
  scheduler::StreamId stream() const { return stream_; }

  absl::Status Upload(scheduler::UploadId upload) {
    std::vector<Bf16> weights(size_t(heads_) * size_t(dims_.nope + dims_.value) * kLora);
    const Row values = scheduler::testing::MakeRow(77, static_cast<int>(weights.size()));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = ToBf16(0.05f * values[i]);
    scheduler::ModelTable& models = h_->core().models();
    auto model = models.Find(h_->core().FindTenant(h_->tenant()), h_->model().id, "model_id");
    if (!model.ok()) return model.status();
    absl::Status s =
        models.weights().Load(**model, upload, 0, 0, heads_, std::as_bytes(std::span(weights)));
    if (!s.ok()) return s;
    EXPECT_TRUE(models.weights().Commit(**model, upload).empty());
    return s;
  }

  absl::Status Begin(scheduler::StepId step, const scheduler::SequenceInfo& seq, int start,
                     int rows) {
    return h_->Begin(stream_, step, {{seq.id, 1, start, rows}})->status;
  }
  absl::Status End(scheduler::StepId step) { return h_->End(stream_, step)->status; }

  // Returns a request of all heads of `rows` rows of the step, with their KV rows. It has not run
  // yet.
  std::unique_ptr<TestRequest> Attend(scheduler::StepId step, int row_begin, int rows,
                                      uint64_t key) {
    auto request = Unsent(step, row_begin, rows, key);
    h_->Submit(request.get());
    return request;
  }
  // The same request in fp32, with values that bf16 cannot represent. `tensors` owns its inputs.
  std::unique_ptr<TestRequest> AttendF32(scheduler::StepId step, int row_begin, int rows,
                                         uint64_t key, std::vector<float>* tensors) {
    auto request = Unsent(step, row_begin, rows, key);
    tensors->clear();
    for (const auto* values : {&request->kv_rows, &request->queries}) {
      for (const Bf16 v : *values) tensors->push_back(ToFloat(v) * 1.001f);
    }
    request->attend.q_dtype = DType::kF32;
    request->attend.kv = reinterpret_cast<const std::byte*>(tensors->data());
    request->attend.q =
        reinterpret_cast<const std::byte*>(tensors->data() + request->kv_rows.size());
    h_->Submit(request.get());
    return request;
  }
  std::unique_ptr<TestRequest> Unsent(scheduler::StepId step, int row_begin, int rows,
                                      uint64_t key) {
    return Slice(stream_, step, row_begin, rows, 0, heads_, /*has_kv=*/true, key);
  }
  // Returns a request of some heads of the rows, with or without KV rows, that is not submitted
  // yet.
  std::unique_ptr<TestRequest> Slice(scheduler::StreamId stream, scheduler::StepId step,
                                     int row_begin, int rows, int head, int heads, bool has_kv,
                                     uint64_t key) {
    std::vector<Row> kv;
    for (int i = 0; has_kv && i < rows; ++i) {
      kv.push_back(scheduler::testing::MakeRow(key * 1000 + row_begin + i, kRowDim));
    }
    auto request = h_->Unsent(stream, step, 0, row_begin, rows, kv, head, heads, 0);
    request->queries.clear();
    for (int row = row_begin; row < row_begin + rows; ++row) {
      for (int h = head; h < head + heads; ++h) {
        const uint64_t of_head = (key * 1000 + row) * heads_ + h;
        for (const float v : scheduler::testing::MakeRow(900000 + of_head, dims_.nope + kRope)) {
          request->queries.push_back(ToBf16(v));
        }
      }
    }
    request->attend.profile = scheduler::Profile::kExpanded;
    request->attend.q = reinterpret_cast<const std::byte*>(request->queries.data());
    request->output.assign(size_t(rows) * heads * dims_.value, NAN);
    request->attend.o = reinterpret_cast<std::byte*>(request->output.data());
    return request;
  }

  // Runs until nothing is ready and nothing is running.
  void Settle() {
    for (int quiet = 0; quiet < 3;) {
      const bool started = h_->core().launches().Start();
      const bool completed = h_->core().launches().Complete(/*wait=*/true);
      quiet = started || completed ? 0 : quiet + 1;
    }
  }

 private:
  const int heads_;
  const ExpandedDims dims_;
  std::unique_ptr<scheduler::testing::EngineHarness> h_;
  scheduler::StreamId stream_ = 0;
};

class EngineExpandedTest : public BackendOnFakeTest {
 protected:
  static std::unique_ptr<HipBackend> Gpu(int64_t expanded_workspace_bytes = 64 << 20,
                                         Vendor vendor = Vendor::kAmd,
                                         int32_t most_rounds = kMostRounds) {
    return Made(Options(), expanded_workspace_bytes, vendor, most_rounds);
  }
  // Returns a backend that copies every tensor.
  static std::unique_ptr<HipBackend> CopyingGpu() {
    HipBackendOptions options = Options();
    options.reach_host = false;
    return Made(std::move(options), 64 << 20, Vendor::kAmd, kMostRounds);
  }
  static std::unique_ptr<HipBackend> Made(HipBackendOptions options,
                                          int64_t expanded_workspace_bytes, Vendor vendor,
                                          int32_t most_rounds) {
    options.most_rounds = most_rounds;
    options.images.push_back(Image("sm_90", kImage90));
    options.vendor = vendor;
    options.expanded_workspace_bytes = expanded_workspace_bytes;
    auto backend = HipBackend::Create(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    return *std::move(backend);
  }
};

inline float LargestOutput(const scheduler::testing::TestRequest& request) {
  float most = 0;
  for (const float v : request.output) most = std::max(most, std::abs(v));
  return most;
}

// Expects that both requests succeeded and that `got` is as close to `want` as every backend must
// be, either absolutely, scaled by the largest value, or relatively. `value` is the largest value
// that the rows attend to. Outputs may not show it: a row with one key outputs that key's value,
// and rows with many keys output smaller values.
inline void ExpectSame(const scheduler::testing::TestRequest& got,
                       const scheduler::testing::TestRequest& want, float value = 0) {
  ASSERT_TRUE(got.answered() && want.answered());
  ASSERT_TRUE(got.status.ok()) << got.status;
  ASSERT_TRUE(want.status.ok()) << want.status;
  ASSERT_EQ(got.output.size(), want.output.size());
  const float largest = std::max(value, LargestOutput(want));
  ASSERT_GT(largest, 0);
  int wrong = 0;
  float worst = 0;
  for (size_t i = 0; i < got.output.size(); ++i) {
    const float off = std::abs(got.output[i] - want.output[i]);
    const float allowed = std::max(2e-3f * largest, 0.016f * std::abs(want.output[i]));
    wrong += !(off <= allowed);  // also counts a NaN
    worst = std::max(worst, off / allowed);
  }
  EXPECT_EQ(wrong, 0) << "of " << got.output.size() << ", the worst " << worst << " bounds";
  ASSERT_EQ(got.lse.size(), want.lse.size());
  for (size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(got.lse[i], want.lse[i], 1e-3) << i;
}

}  // namespace mla::kernels::hip

#endif  // MLA_TESTS_FAKE_HIP_ENGINE_EXPANDED_ENGINE_H_
