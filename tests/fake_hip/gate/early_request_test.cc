// Tests requests that are submitted before their tensors are ready, from the engine down to the
// kernels of sm_90 on the fake runtime. A launch whose gate times out must leave the outputs
// unchanged.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/hip/hip_backend.h"
#include "scheduler/batching/ahead_pauses.h"
#include "tests/fake_hip/backend_fixture.h"
#include "tests/fake_hip/engine/expanded_engine.h"

namespace mla::kernels::hip {
namespace {

using TestRequest = scheduler::testing::TestRequest;

// Tests with requests whose tensors lie in memory that the GPU shares with their client.
class EarlyRequestTest : public BackendOnFakeTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(BackendOnFakeTest::SetUp());
    auto backend = HipBackend::Create(Sm90Options());
    ASSERT_TRUE(backend.ok()) << backend.status();
    gpu_ = backend->get();
    scheduler::Limits limits = ExpandedEngine::Limits();
    limits.ahead_us = 50;
    engine_ = std::make_unique<ExpandedEngine>(*std::move(backend), 2, limits);
    Share(std::as_writable_bytes(std::span(&ready_, 1)));
    Share(std::as_writable_bytes(std::span(&nearby_, 1)));
  }
  void TearDown() override {
    engine_.reset();
    BackendOnFakeTest::TearDown();
  }
  void Share(std::span<std::byte> memory) { ASSERT_TRUE(gpu_->RegisterHost(memory).ok()); }
  void Share(TestRequest* request) {
    Share(std::as_writable_bytes(std::span(request->kv_rows)));
    Share(std::as_writable_bytes(std::span(request->queries)));
    Share(std::as_writable_bytes(std::span(request->output)));
    request->attend.on_device = true;
    request->attend.want_lse = false;
    request->attend.lse = nullptr;
  }
  void Unshare(TestRequest* request) {
    gpu_->UnregisterHost(std::as_writable_bytes(std::span(request->kv_rows)));
    gpu_->UnregisterHost(std::as_writable_bytes(std::span(request->queries)));
    gpu_->UnregisterHost(std::as_writable_bytes(std::span(request->output)));
  }
  // Expects that the launch is too late and leaves the outputs unchanged, and that the next launch
  // writes them. `nearby` is the word of a client on the same device.
  void ExpectNothingWrittenTooLate(std::unique_ptr<TestRequest> request,
                                   uint32_t* nearby = nullptr) {
    Share(request.get());
    std::fill(request->output.begin(), request->output.end(), kMark);
    ready_ = 0;
    request->attend.ready = {&ready_, 1, nearby};
    const uint64_t late = engine_->harness().core().Stats().launches_late;
    engine_->harness().Submit(request.get());
    engine_->Settle();
    EXPECT_EQ(request->handed_back, scheduler::HandedBack::kLate);
    EXPECT_EQ(engine_->harness().core().Stats().launches_late, late + 1);
    EXPECT_EQ(std::count(request->output.begin(), request->output.end(), kMark),
              static_cast<int64_t>(request->output.size()));
    request->attend.ready = {};
    engine_->harness().Submit(request.get());
    engine_->Settle();
    EXPECT_TRUE(request->status.ok()) << request->status;
    EXPECT_EQ(std::count(request->output.begin(), request->output.end(), kMark), 0);
    Unshare(request.get());
    engine_->harness().AdvanceMicros(scheduler::AheadPauses::kLongestNanos / 1000);
  }
  // Returns a request of two heads with one row of each sequence of the step.
  std::unique_ptr<TestRequest> Absorbed(scheduler::StepId step, int rows) {
    const std::vector<scheduler::testing::Row> kv(
        static_cast<size_t>(rows), scheduler::testing::MakeRow(step, ExpandedEngine::kRowDim));
    return engine_->harness().Unsent(engine_->stream(), step, 0, 0, rows, kv, 0, 2, step);
  }

  static constexpr float kMark = 12345.0f;
  HipBackend* gpu_ = nullptr;
  std::unique_ptr<ExpandedEngine> engine_;
  alignas(64) uint32_t ready_ = 0;
  alignas(64) uint32_t nearby_ = 0;
};

TEST_F(EarlyRequestTest, ALaunchThatComesTooLateWritesNothing) {
  constexpr int kPrompt = 300;  // each of its launches counts as one
  const auto a = engine_->harness().Open();
  const auto b = engine_->harness().Open();
  for (const auto& [step, sequence] : {std::pair(1, &a), std::pair(2, &b)}) {
    ASSERT_TRUE(engine_->Begin(step, *sequence, 0, kPrompt).ok());
    const auto prompt = engine_->Attend(step, 0, kPrompt, step);
    engine_->Settle();
    ASSERT_TRUE(prompt->status.ok()) << prompt->status;
    ASSERT_TRUE(engine_->End(step).ok());
  }
  const auto c = engine_->harness().Open();
  ASSERT_TRUE(engine_->Begin(3, c, 0, kExpandedFormRows).ok());
  auto expanded = engine_->Unsent(3, 0, kExpandedFormRows, 3);
  Share(expanded.get());
  expanded->attend.ready = {&ready_, 1};
  engine_->harness().Submit(expanded.get());
  engine_->Settle();
  EXPECT_EQ(expanded->handed_back, scheduler::HandedBack::kBusy);
  Unshare(expanded.get());
  ASSERT_TRUE(engine_->Begin(4, a, kPrompt, 1).ok());
  ExpectNothingWrittenTooLate(engine_->Unsent(4, 0, 1, 4));  // absorbed, one row
  ASSERT_TRUE(engine_->End(4).ok());
  ASSERT_TRUE(engine_->Begin(5, b, kPrompt, 20).ok());
  ExpectNothingWrittenTooLate(engine_->Unsent(5, 0, 20, 5));
  ASSERT_TRUE(engine_->End(5).ok());
  ASSERT_TRUE(engine_->Begin(6, a, kPrompt + 1, 1).ok());
  ExpectNothingWrittenTooLate(Absorbed(6, 1));  // one tile, whose parts the tile's blocks merge
  ASSERT_TRUE(engine_->End(6).ok());
  auto both = engine_->harness().Begin(engine_->stream(), 7,
                                       {{a.id, 1, kPrompt + 2, 1}, {b.id, 1, kPrompt + 20, 1}});
  ASSERT_TRUE(both->status.ok()) << both->status;
  ExpectNothingWrittenTooLate(Absorbed(7, 2));
}

// The projection of one row loads its weights while a gate waits for another device. On the
// client's own device, its blocks would keep the client's kernels from running, and the gate waits
// for these kernels.
TEST_F(EarlyRequestTest, ProjectionsStandByForOtherDevicesAlone) {
  constexpr int kPrompt = 20;
  const auto a = engine_->harness().Open();
  ASSERT_TRUE(engine_->Begin(1, a, 0, kPrompt).ok());
  const auto prompt = engine_->Attend(1, 0, kPrompt, 1);
  engine_->Settle();
  ASSERT_TRUE(prompt->status.ok()) << prompt->status;
  ASSERT_TRUE(engine_->End(1).ok());
  EXPECT_EQ(control_->early_starts, 0) << "without a gate";
  ASSERT_TRUE(engine_->Begin(2, a, kPrompt, 1).ok());
  ExpectNothingWrittenTooLate(engine_->Unsent(2, 0, 1, 2), &nearby_);
  ASSERT_TRUE(engine_->End(2).ok());
  EXPECT_EQ(control_->early_starts, 0) << "on the same device";
  ASSERT_TRUE(engine_->Begin(3, a, kPrompt + 1, 2).ok());
  ExpectNothingWrittenTooLate(engine_->Unsent(3, 0, 2, 3));
  ASSERT_TRUE(engine_->End(3).ok());
  EXPECT_EQ(control_->early_starts, 0) << "two rows";
  ASSERT_TRUE(engine_->Begin(4, a, kPrompt + 3, 1).ok());
  ExpectNothingWrittenTooLate(engine_->Unsent(4, 0, 1, 4));
  EXPECT_EQ(control_->early_starts, 1);
}

}  // namespace
}  // namespace mla::kernels::hip
