// Results that are not finite: an error if the inputs are finite, NaN if they are not.
#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler {
namespace {

using kernels::Bf16;
using kernels::ToBf16;
using testing::EngineHarness;
using testing::Rows;
using testing::TestRequest;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kDim = 12, kHeads = 2, kLora = 8;

// By whether the CPU backend or the reference computes.
class EngineResultsTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineResultsTest() {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
    if (GetParam()) {
      kernels::BackendOptions cpu;
      cpu.threads = 2;
      cpu.pin_threads = false;
      options.backend = *kernels::CpuBackend::Create(cpu);
    }
    h_ = std::make_unique<EngineHarness>(std::move(options));
    stream_ = h_->core().steps().OpenStream(h_->tenant());
  }

  // Two rows of step `step`, unsent, with answers that hold no NaN yet.
  std::unique_ptr<TestRequest> TwoRows(StepId step) {
    return h_->Unsent(stream_, step, 0, 0, 2, Rows(2, step), 0, kHeads, 5);
  }
  void Send(TestRequest* request) {
    h_->Submit(request);
    h_->Run();
  }
  static Bf16& Key(TestRequest& r, int row, int i) { return r.kv_rows[row * kDim + i]; }
  static Bf16& Query(TestRequest& r, int row, int head, int i) {
    return r.queries[(row * kHeads + head) * kDim + i];
  }
  static bool AllNaN(const TestRequest& r, int row, int head) {
    bool all = !r.attend.want_lse || std::isnan(r.lse[row * kHeads + head]);
    for (int i = 0; i < kLora; ++i) {
      all &= std::isnan(r.output[(row * kHeads + head) * kLora + i]);
    }
    return all;
  }
  static bool AllFinite(const TestRequest& r, int row, int head) {
    bool all = !r.attend.want_lse || std::isfinite(r.lse[row * kHeads + head]);
    for (int i = 0; i < kLora; ++i) {
      all &= std::isfinite(r.output[(row * kHeads + head) * kLora + i]);
    }
    return all;
  }
  static void ExpectRefused(const TestRequest& r, const char* where) {
    EXPECT_EQ(r.status.code(), absl::StatusCode::kInvalidArgument) << r.status;
    EXPECT_EQ(r.detail.reason, "result_not_finite");
    EXPECT_THAT(r.detail.got, ::testing::HasSubstr(where));
  }
  SequenceInfo Begin(StepId step, int rows) {
    const SequenceInfo sequence = h_->Open();
    EXPECT_TRUE(h_->Begin(stream_, step, {{sequence.id, 1, 0, rows}})->status.ok());
    return sequence;
  }

  std::unique_ptr<EngineHarness> h_;
  StreamId stream_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Backends, EngineResultsTest, ::testing::Bool());

TEST_P(EngineResultsTest, WhatFiniteInputsCanNotGiveIsAnErrorOfThatRequest) {
  for (const bool want_lse : {true, false}) {
    // Logits of +inf make NaN; logits of -inf have weight 0.
    for (const float sign : {1.0f, -1.0f}) {
      const StepId step = 1 + 2 * want_lse + (sign > 0);
      Begin(step, 2);
      Begin(step + 10, 2);
      auto bad = TwoRows(step);
      bad->attend.want_lse = want_lse;
      for (int row = 0; row < 2; ++row) Key(*bad, row, 3) = ToBf16(1e20f);
      Query(*bad, 1, 1, 3) = ToBf16(sign * 3e38f);
      auto good = TwoRows(step + 10);
      h_->Submit(bad.get());
      Send(good.get());
      ExpectRefused(*bad, "row 1, head 1");
      EXPECT_TRUE(good->status.ok()) << good->status;
      for (int cell = 0; cell < 4; ++cell) EXPECT_TRUE(AllFinite(*good, cell / 2, cell % 2));
      ASSERT_TRUE(h_->Abort(stream_, step)->status.ok());
      ASSERT_TRUE(h_->Abort(stream_, step + 10)->status.ok());
    }
  }
}

TEST_P(EngineResultsTest, KvElementsThatAreTooLargeAreAnErrorToo) {
  Begin(1, 2);
  auto request = TwoRows(1);
  Key(*request, 1, 2) = ToBf16(std::ldexp(1.0f, 79));
  Send(request.get());
  EXPECT_TRUE(request->status.ok()) << request->status;
  ASSERT_TRUE(h_->Abort(stream_, 1)->status.ok());
  Begin(2, 2);
  auto larger = TwoRows(2);
  Key(*larger, 1, 2) = ToBf16(std::ldexp(-1.0f, 80));
  Send(larger.get());
  ExpectRefused(*larger, "row 1, head 0");
}

TEST_P(EngineResultsTest, RowsThatAreNotFiniteMakeNaNOfWhatSeesThemAlone) {
  for (const float value : {kNaN, kInf, -kInf}) {
    for (const int element : {0, kDim - 1}) {
      const StepId step = 1;
      Begin(step, 2);
      Begin(step + 1, 2);
      auto bad = TwoRows(step);
      Key(*bad, 1, element) = ToBf16(value);
      auto good = TwoRows(step + 1);
      h_->Submit(bad.get());
      Send(good.get());
      ASSERT_TRUE(bad->status.ok()) << bad->status;
      for (int head = 0; head < kHeads; ++head) {
        EXPECT_TRUE(AllFinite(*bad, 0, head)) << value;
        EXPECT_TRUE(AllNaN(*bad, 1, head)) << value;
        EXPECT_TRUE(AllFinite(*good, 0, head) && AllFinite(*good, 1, head));
      }
      ASSERT_TRUE(h_->Abort(stream_, step)->status.ok());
      ASSERT_TRUE(h_->Abort(stream_, step + 1)->status.ok());
    }
  }
}

// Later steps, forks, and rows that came without queries.
TEST_P(EngineResultsTest, ASequenceKeepsWhatItsRowsHold) {
  const SequenceInfo sequence = Begin(1, 2);
  for (const int layer : {0, 1}) {
    auto rows = Rows(2, 3);
    rows[1][4] = kInf;
    auto sent = h_->AppendOnly(stream_, 1, layer, 0, rows);
    h_->Run();
    ASSERT_TRUE(sent->status.ok()) << sent->status;
  }
  ASSERT_TRUE(h_->End(stream_, 1)->status.ok());
  ForkArgs fork;
  fork.tenant = h_->tenant();
  fork.parent = sequence.id;
  fork.expected_epoch = 1;
  const auto child = h_->core().sequences().Fork(fork);
  ASSERT_TRUE(child.ok()) << child.status();
  StepId step = 2;
  for (const SequenceId id : {sequence.id, child->id}) {
    ASSERT_TRUE(h_->Begin(stream_, step, {{id, 1, 2, 2}})->status.ok());
    auto next = TwoRows(step++);
    Send(next.get());
    ASSERT_TRUE(next->status.ok()) << next->status;
    EXPECT_TRUE(AllNaN(*next, 0, 0) && AllNaN(*next, 1, 1));
  }
}

// The expected answers of a sequence depend on its present rows.
TEST_P(EngineResultsTest, RowsThatAreGoneExcuseNothing) {
  SequenceInfo sequence = Begin(1, 2);
  const auto append = [&](StepId step, bool finite) {
    for (const int layer : {0, 1}) {
      auto rows = Rows(2, 3);
      if (!finite) rows[1][4] = kInf;  // the second of the step's rows
      auto sent = h_->AppendOnly(stream_, step, layer, 0, rows);
      h_->Run();
      ASSERT_TRUE(sent->status.ok()) << sent->status;
    }
  };
  // The answer to finite rows at the sequence's end, of which fp32 cannot hold the result.
  const auto overflow = [&](StepId step, SequenceId id, uint64_t epoch, int64_t length) {
    EXPECT_TRUE(h_->Begin(stream_, step, {{id, epoch, length, 2}})->status.ok());
    auto request = TwoRows(step);
    for (int row = 0; row < 2; ++row) Key(*request, row, 3) = ToBf16(1e20f);
    Query(*request, 0, 0, 3) = ToBf16(3e38f);
    Send(request.get());
    EXPECT_TRUE(h_->Abort(stream_, step)->status.ok());
    return request;
  };
  append(1, /*finite=*/true);
  ASSERT_TRUE(h_->End(stream_, 1)->status.ok());

  // Rows of an aborted step, and rows that were not committed.
  ASSERT_TRUE(h_->Begin(stream_, 2, {{sequence.id, 1, 2, 2}})->status.ok());
  append(2, /*finite=*/false);
  ASSERT_TRUE(h_->Abort(stream_, 2)->status.ok());
  ExpectRefused(*overflow(3, sequence.id, 1, 2), "row 0, head 0");
  ASSERT_TRUE(h_->Begin(stream_, 4, {{sequence.id, 1, 2, 2}})->status.ok());
  append(4, /*finite=*/false);
  ASSERT_TRUE(h_->End(stream_, 4, {1})->status.ok());
  ExpectRefused(*overflow(5, sequence.id, 1, 3), "row 0, head 0");

  // Committed rows count until they are truncated; a fork has the rows that it was given.
  ASSERT_TRUE(h_->Begin(stream_, 6, {{sequence.id, 1, 3, 2}})->status.ok());
  append(6, /*finite=*/false);
  ASSERT_TRUE(h_->End(stream_, 6)->status.ok());
  ForkArgs fork;
  fork.tenant = h_->tenant();
  fork.parent = sequence.id;
  fork.expected_epoch = 1;
  const auto whole = h_->core().sequences().Fork(fork);
  fork.length = 4;
  const auto part = h_->core().sequences().Fork(fork);
  ASSERT_TRUE(whole.ok() && part.ok());
  auto expected = overflow(7, whole->id, 1, 5);
  EXPECT_TRUE(expected->status.ok() && AllNaN(*expected, 0, 0)) << expected->status;
  ExpectRefused(*overflow(8, part->id, 1, 4), "row 0, head 0");
  const auto kept = h_->core().sequences().Truncate(h_->tenant(), sequence.id, 5, 1);
  ASSERT_TRUE(kept.ok()) << kept.status();
  expected = overflow(9, sequence.id, 2, 5);
  EXPECT_TRUE(expected->status.ok() && AllNaN(*expected, 0, 0)) << expected->status;
  const auto cut = h_->core().sequences().Truncate(h_->tenant(), sequence.id, 4, 2);
  ASSERT_TRUE(cut.ok()) << cut.status();
  ExpectRefused(*overflow(10, sequence.id, 3, 4), "row 0, head 0");
}

// A row sees only earlier rows, so later rows do not excuse a result that is not finite.
TEST_P(EngineResultsTest, RowsBehindExcuseNothing) {
  Begin(1, 2);
  auto request = TwoRows(1);
  Key(*request, 0, 3) = ToBf16(1e20f);
  Query(*request, 0, 1, 3) = ToBf16(3e38f);
  Key(*request, 1, 5) = ToBf16(kInf);
  Send(request.get());
  ExpectRefused(*request, "row 0, head 1");
}

TEST_P(EngineResultsTest, AQueryThatIsNotFiniteMakesNaNOfItsRowAndHead) {
  for (const bool want_lse : {true, false}) {
    for (const float value : {kNaN, kInf, -kInf}) {
      for (const int element : {0, kDim - 1}) {
        Begin(1, 2);
        auto request = TwoRows(1);
        request->attend.want_lse = want_lse;
        // All keys alike, so that an infinite query gives every logit the same infinity.
        for (int row = 0; row < 2; ++row) Key(*request, row, element) = ToBf16(0.5f);
        Query(*request, 1, 0, element) = ToBf16(value);
        Send(request.get());
        ASSERT_TRUE(request->status.ok()) << request->status;
        EXPECT_TRUE(AllNaN(*request, 1, 0)) << value;
        EXPECT_TRUE(AllFinite(*request, 0, 0) && AllFinite(*request, 1, 1)) << value;
        ASSERT_TRUE(h_->Abort(stream_, 1)->status.ok());
      }
    }
  }
}

// KV rows in shared memory stay the client's to write. The last row holds a NaN every other moment,
// and ends where the mapping does.
TEST(EngineRowsTest, RowsThatChangeMeanwhileAreReadWithinTheirBounds) {
  constexpr int kRows = 2048;
  constexpr size_t kElements = size_t{kRows} * kDim, kBytes = kElements * sizeof(Bf16);
  constexpr size_t kPage = 4096, kMapped = (kBytes + kPage - 1) / kPage * kPage;
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
  options.model.page_size = 64;
  Limits& limits = options.limits;
  limits.max_sequence_rows = limits.max_step_rows = kRows;
  limits.launch_rows = limits.prefill_rows = kRows;
  limits.launch_packed_rows = 2 * kRows;
  EngineHarness h(std::move(options));
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  void* const mapped =
      mmap(nullptr, kMapped + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  ASSERT_EQ(mprotect(mapped, kMapped, PROT_READ | PROT_WRITE), 0);
  std::byte* const rows = static_cast<std::byte*>(mapped) + kMapped - kBytes;
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    std::atomic_ref<Bf16> last(reinterpret_cast<Bf16*>(rows)[kElements - 1]);
    while (!stop) {
      last = ToBf16(kNaN);
      last = ToBf16(1);
    }
  });
  for (StepId step = 1; step <= 3000; ++step) {
    const SequenceInfo sequence = h.Open();
    ASSERT_TRUE(h.Begin(stream, step, {{sequence.id, 1, 0, kRows}})->status.ok());
    TestRequest request;
    request.stream = stream;
    request.step_id = step;
    request.attend.row_count = kRows;
    request.attend.profile = Profile::kAppendOnly;
    request.attend.has_kv = true;
    request.attend.kv = rows;
    h.Submit(&request);
    h.Run();
    EXPECT_TRUE(request.status.ok()) << request.status;
    std::vector<SequenceId> missing;
    h.core().sequences().Release(h.tenant(), {&sequence.id, 1}, &missing);
  }
  stop = true;
  writer.join();
  munmap(mapped, kMapped + kPage);
}

}  // namespace
}  // namespace mla::scheduler
