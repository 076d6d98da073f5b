// Tests the EXPANDED profile from the engine down to the GPU's kernels, on the fake HIP runtime.
// Prompts take the expanded form, decode and extend take the absorbed one, and results are compared
// with the reference backend.
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "tests/fake_hip/engine/expanded_engine.h"

namespace mla::kernels::hip {
namespace {

using ::testing::HasSubstr;
using TestRequest = scheduler::testing::TestRequest;

// Runs prompts that are cut into launches, so that the later launches have a context. One prompt
// runs together with a decode and an extend, and one takes a single launch.
std::vector<std::unique_ptr<TestRequest>> RunScript(ExpandedEngine& engine) {
  std::vector<std::unique_ptr<TestRequest>> requests;
  const auto a = engine.harness().Open();
  const auto b = engine.harness().Open();
  const auto c = engine.harness().Open();
  EXPECT_TRUE(engine.Begin(1, a, 0, 300).ok());
  requests.push_back(engine.Attend(1, 0, 300, 1));
  engine.Settle();
  EXPECT_TRUE(engine.End(1).ok());
  EXPECT_TRUE(engine.Begin(2, b, 0, 131).ok());
  requests.push_back(engine.Attend(2, 0, 131, 2));
  engine.Settle();
  EXPECT_TRUE(engine.End(2).ok());
  EXPECT_TRUE(engine.Begin(3, a, 300, 1).ok());
  EXPECT_TRUE(engine.Begin(4, b, 131, 20).ok());
  EXPECT_TRUE(engine.Begin(5, c, 0, 130).ok());
  requests.push_back(engine.Attend(3, 0, 1, 3));
  requests.push_back(engine.Attend(4, 0, 20, 4));
  requests.push_back(engine.Attend(5, 0, 130, 5));
  engine.Settle();
  return requests;
}

// The workspaces hold keys and values of all heads, of some heads, and of less than one context.
TEST_F(EngineExpandedTest, PromptsDecodesAndExtendsEqualTheReference) {
  ExpandedEngine reference(nullptr);
  const auto want = RunScript(reference);
  for (const int64_t workspace : {int64_t{64} << 20, int64_t{200000}}) {
    for (const char* arch : {"gfx950", "gfx942"}) {
      SCOPED_TRACE(arch + (" " + std::to_string(workspace)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      ExpandedEngine gpu(Gpu(workspace));
      const auto got = RunScript(gpu);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        ExpectSame(*got[i], *want[i]);
      }
      // At least the four pieces of prompts that are long enough: 160 + 140, 131 and 130 rows. A
      // context that does not fit the workspace is processed in several rounds.
      EXPECT_GE(control_->expanded_launches, workspace < 1 << 20 ? 8 : 4);
      EXPECT_TRUE(gpu.harness().core().backend().Healthy().ok());
    }
  }
}

// Prompts that need more rounds than a launch may have take the absorbed form, which has no rounds,
// and give the same answers. Three of the script's four launches with a prompt need two rounds, and
// one needs four.
TEST_F(EngineExpandedTest, PromptsWithTooManyRoundsTakeTheAbsorbedForm) {
  ExpandedEngine reference(nullptr);
  const auto want = RunScript(reference);
  for (const char* arch : {"gfx950", "gfx942", "sm_90"}) {
    for (const int32_t most : {1, 3}) {
      SCOPED_TRACE(arch + (" " + std::to_string(most)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      const bool nvidia = arch == std::string("sm_90");
      ExpandedEngine gpu(Gpu(200000, nvidia ? Vendor::kNvidia : Vendor::kAmd, most));
      const auto got = RunScript(gpu);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        // Outputs are averages of many values, so the rows see larger values than any output.
        ExpectSame(*got[i], *want[i], 1.25f * LargestOutput(*want[i]));
      }
      EXPECT_EQ(gpu.harness().core().Stats().rounds_refused, most == 1 ? 4u : 1u);
      EXPECT_EQ(control_->expanded_launches > 0, most > 1);
      EXPECT_TRUE(gpu.harness().core().backend().Healthy().ok());
    }
  }
}

TEST_F(EngineExpandedTest, RowsBelowTheTurningPointTakeTheAbsorbedForm) {
  ExpandedEngine gpu(Gpu());
  control_->expanded_launches = 0;
  const auto seq = gpu.harness().Open();
  ASSERT_TRUE(gpu.Begin(1, seq, 0, 2 * kExpandedFormRows - 1).ok());
  const auto below = gpu.Attend(1, 0, kExpandedFormRows - 1, 1);
  gpu.Settle();
  ASSERT_TRUE(below->status.ok()) << below->status;
  EXPECT_EQ(control_->expanded_launches, 0);
  const auto at = gpu.Attend(1, kExpandedFormRows - 1, kExpandedFormRows, 1);
  gpu.Settle();
  ASSERT_TRUE(at->status.ok()) << at->status;
  EXPECT_GT(control_->expanded_launches, 0);
}

// Heads of 192/256 have their own kernels, of which fewer blocks fit one unit on AMD. A server
// whose limits allow these heads also has room for the blocks of the other kernels.
TEST_F(EngineExpandedTest, PromptsOfWiderHeadsTakeTheExpandedForm) {
  constexpr int kRows = kExpandedFormRowsWide;
  scheduler::Limits limits = ExpandedEngine::Limits(1);
  limits.max_v_dim = kDims256.value;
  limits.weights_bytes = int64_t{kDims256.nope + kDims256.value} * ExpandedEngine::kLora * 2;
  limits.launch_rows = limits.launch_packed_rows = limits.prefill_rows = kRows;
  const auto run = [&](std::unique_ptr<AttentionBackend> backend, const ExpandedDims& dims) {
    ExpandedEngine engine(std::move(backend), 1, limits, /*upload=*/true, dims);
    const auto seq = engine.harness().Open();
    EXPECT_TRUE(engine.Begin(1, seq, 0, kRows).ok());
    auto request = engine.Attend(1, 0, kRows, 1);
    engine.Settle();
    return request;
  };
  for (const char* arch : {"sm_90", "gfx950", "gfx942"}) {
    for (const ExpandedDims& dims : {kDims256, kDims128}) {
      SCOPED_TRACE(arch + (" " + std::to_string(dims.value)));
      control_->arch = arch;
      control_->expanded_launches = 0;
      const bool nvidia = arch == std::string("sm_90");
      const auto got = run(Gpu(640 << 20, nvidia ? Vendor::kNvidia : Vendor::kAmd), dims);
      EXPECT_EQ(control_->expanded_launches, 1);
      ExpectSame(*got, *run(nullptr, dims));
    }
  }
}

// The rounds of an earlier plan are reused if the lengths are equal, on the host and on the device.
TEST_F(EngineExpandedTest, APromptOfTheSameLengthsUploadsNoRounds) {
  ExpandedEngine gpu(CopyingGpu());
  constexpr int kRows = 160;
  int64_t copies[2], bytes[2];
  for (const int i : {0, 1}) {
    const auto seq = gpu.harness().Open();
    const auto step = static_cast<scheduler::StepId>(i) + 1;
    ASSERT_TRUE(gpu.Begin(step, seq, 0, kRows).ok());
    copies[i] = control_->copies_in;
    bytes[i] = control_->bytes_in;
    const auto prompt = gpu.Attend(step, 0, kRows, 1);
    gpu.Settle();
    ASSERT_TRUE(prompt->status.ok()) << prompt->status;
    copies[i] = control_->copies_in - copies[i];
    bytes[i] = control_->bytes_in - bytes[i];
    ASSERT_TRUE(gpu.End(step).ok());
  }
  EXPECT_EQ(copies[0], 3);  // the plan, metadata, and the staged tensors
  EXPECT_EQ(copies[1], 2);
  // Two heads with two tiles of rows each.
  EXPECT_GE(bytes[0] - bytes[1], 4 * int64_t{sizeof(ExpandedItem)});
}

// Each message has fewer rows than the expanded form needs. Messages that wait together have
// enough.
TEST_F(EngineExpandedTest, RowsOfSeveralMessagesTakeTheExpandedFormTogether) {
  constexpr int kMessage = 50;
  static_assert(kMessage < kExpandedFormRows && 3 * kMessage >= kExpandedFormRows);
  std::vector<std::unique_ptr<TestRequest>> answers[2];
  for (const bool on_gpu : {true, false}) {
    std::unique_ptr<AttentionBackend> backend;
    if (on_gpu) backend = Gpu();
    ExpandedEngine engine(std::move(backend));
    control_->expanded_launches = 0;
    const auto seq = engine.harness().Open();
    ASSERT_TRUE(engine.Begin(1, seq, 0, 3 * kMessage).ok());
    for (int message = 0; message < 3; ++message) {
      answers[on_gpu ? 0 : 1].push_back(engine.Attend(1, message * kMessage, kMessage, 1));
    }
    engine.Settle();
    if (on_gpu) {
      EXPECT_GT(control_->expanded_launches, 0);
    }
  }
  for (int message = 0; message < 3; ++message) {
    SCOPED_TRACE(message);
    ASSERT_TRUE(answers[0][message]->status.ok()) << answers[0][message]->status;
    // The first row of the first message attends to one key.
    ExpectSame(*answers[0][message], *answers[1][message], LargestOutput(*answers[1][0]));
  }
}

// This launch has the largest number of projection records. Slices of all ranks are fused into one
// attention record, but each slice has its own projection records. A second step has one sequence
// for each record that is left.
TEST_F(EngineExpandedTest, ALaunchTakesARecordForEverySliceBesideThoseOfTheOthers) {
  constexpr int kRanks = 7;
  scheduler::Limits limits = ExpandedEngine::Limits(kRanks);
  limits.launch_requests = kRanks + 1;
  limits.max_participants = limits.max_step_sequences = kRanks;
  std::vector<std::unique_ptr<TestRequest>> answers[2];
  for (const bool on_gpu : {true, false}) {
    std::unique_ptr<AttentionBackend> backend;
    if (on_gpu) backend = Gpu();
    ExpandedEngine engine(std::move(backend), kRanks, limits);
    auto& h = engine.harness();
    std::vector<scheduler::StreamId> streams;
    for (int i = 0; i < kRanks; ++i) streams.push_back(h.core().steps().OpenStream(h.tenant()));
    const auto shared = h.Open();
    for (const scheduler::StreamId stream : streams) {
      ASSERT_TRUE(h.Begin(stream, 1, {{shared.id, 1, 0, 2}}, kRanks)->status.ok());
    }
    std::vector<scheduler::StepSequenceArgs> sequences;
    for (int i = 0; i < kRanks; ++i) sequences.push_back({h.Open().id, 1, 0, 1});
    ASSERT_TRUE(h.Begin(engine.stream(), 2, sequences)->status.ok());
    std::vector<std::unique_ptr<TestRequest>>& own = answers[on_gpu ? 0 : 1];
    for (int i = 0; i < kRanks; ++i) {
      own.push_back(engine.Slice(streams[i], 1, 0, 2, i, 1, i == 0, 1));
    }
    own.push_back(engine.Slice(engine.stream(), 2, 0, kRanks, 0, kRanks, true, 2));
    for (const auto& request : own) h.Submit(request.get());
    engine.Settle();
    EXPECT_EQ(h.core().Stats().launches, 1u);
    EXPECT_EQ(h.core().Stats().slices_fused, uint64_t{kRanks});
  }
  for (size_t i = 0; i < answers[0].size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(*answers[0][i], *answers[1][i]);
  }
}

// The matrix cores multiply bf16. Rounding absorbed queries to bf16 would exceed the error bound of
// outputs, so ABSORBED refuses fp32 queries before anything is staged. EXPANDED accepts them.
TEST_F(EngineExpandedTest, Fp32QueriesAreTakenInExpandedAndRefusedInAbsorbed) {
  ExpandedEngine reference(nullptr);
  ExpandedEngine gpu(Gpu());
  std::vector<std::unique_ptr<TestRequest>> answers;
  std::vector<float> tensors[4];
  int next = 0;
  for (ExpandedEngine* engine : {&gpu, &reference}) {
    const auto seq = engine->harness().Open();
    ASSERT_TRUE(engine->Begin(1, seq, 0, 135).ok());
    answers.push_back(engine->AttendF32(1, 0, 131, 1, &tensors[next++]));
    answers.push_back(engine->AttendF32(1, 131, 4, 2, &tensors[next++]));
    engine->Settle();
  }
  ExpectSame(*answers[0], *answers[2]);
  ExpectSame(*answers[1], *answers[3]);

  std::vector<float> q(size_t{2} * ExpandedEngine::kRowDim, 0.5f);
  const auto absorbed = [&q](ExpandedEngine& engine) {
    auto request = engine.harness().Unsent(engine.stream(), 1, 0, 134, 1, {}, 0, 2, 5);
    request->attend.q_dtype = DType::kF32;
    request->attend.q = reinterpret_cast<const std::byte*>(q.data());
    engine.harness().Submit(request.get());
    engine.Settle();
    return request;
  };
  const auto taken = absorbed(reference);
  EXPECT_TRUE(taken->status.ok()) << taken->status;
  const int64_t launches = control_->launches;
  const auto refused = absorbed(gpu);
  EXPECT_EQ(control_->launches, launches);
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kUnimplemented) << refused->status;
  for (const char* part : {"wanted: absorbed heads=2", "supported: ", "missing: this query dtype",
                           "device: Fake Instinct (gfx950)"}) {
    EXPECT_THAT(refused->status.message(), HasSubstr(part));
  }
  EXPECT_EQ(refused->detail.field, "attend.q_dtype");
  EXPECT_EQ(refused->detail.reason, "unsupported_dtype");
  EXPECT_FALSE(refused->step_aborted);
  EXPECT_TRUE(gpu.End(1).ok()) << "the step goes on";
}

}  // namespace
}  // namespace mla::kernels::hip
