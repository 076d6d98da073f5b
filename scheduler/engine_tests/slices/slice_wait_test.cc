// Tests whom the head slices of tensor-parallel ranks wait for: ranks that keep up, hesitate, are
// late, send nothing or come back, in simulated time. As in a real worker, no rank goes to the next
// layer before all ranks that send have the answers of this one.
#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/rank_harness.h"

namespace mla::scheduler {
namespace {

using testing::kRankHeads;
using testing::kSliceWaitMicros;
using testing::LimitsOfRanks;
using testing::Pointers;
using testing::RankHarness;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

constexpr int kLayers = 8;
constexpr int64_t kNever = -1;
constexpr double kTolerance = 2e-5;
constexpr StepId kStep = 1;

// Result of a layer. Times in microseconds from the moment at which its first slice was sent.
struct LayerOutcome {
  std::vector<int64_t> waited;  // by rank, its answer after its slice; kNever where it sent none
  int64_t took = 0;             // until the last answer
  int64_t records = 0;
};

class SliceWaitTest : public ::testing::TestWithParam<int> {
 protected:
  // A step of one row, begun by all ranks but the last `absent`.
  void Begin(int absent = 0) {
    r_ = std::make_unique<RankHarness>(GetParam(), LimitsOfRanks(), kLayers);
    sequence_ = r_->harness().Open();
    ASSERT_TRUE(r_->Begin(kStep, {{sequence_.id, 1, 0, 1}}, r_->ranks() - absent));
  }

  // Rank i sends its slice of the next layer delays[i] microseconds from now.
  LayerOutcome Layer(const std::vector<int64_t>& delays) {
    EngineCore& core = r_->core();
    const std::vector<Row> row = Rows(1, static_cast<uint64_t>(layer_));
    const MonotonicNanos begin = r_->harness().clock().Now();
    const auto micros = [&] { return (r_->harness().clock().Now() - begin) / 1000; };
    const int64_t before = r_->backend().attended_records();
    LayerOutcome outcome{std::vector<int64_t>(delays.size(), kNever)};
    std::vector<std::unique_ptr<TestRequest>> slices(delays.size());
    std::vector<int> order;
    for (int i = 0; i < static_cast<int>(delays.size()); ++i) {
      if (delays[i] != kNever) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return std::pair(delays[a], a) < std::pair(delays[b], b); });
    size_t sent = 0, answered = 0;
    while (answered < order.size()) {
      // The next thing that happens: a rank sends, or a wait is over.
      int64_t next = (core.steps().NextTick() - begin) / 1000 - micros();
      if (sent < order.size()) next = std::min(next, delays[order[sent]] - micros());
      if (next > 0) r_->harness().AdvanceMicros(next);
      for (; sent < order.size() && delays[order[sent]] <= micros(); ++sent) {
        slices[order[sent]] = r_->Send(order[sent], kStep, layer_, row);
      }
      r_->harness().Run();
      for (const int rank : order) {
        if (outcome.waited[rank] != kNever || slices[rank] == nullptr) continue;
        if (!slices[rank]->answered()) continue;
        outcome.waited[rank] = micros() - delays[rank];
        ++answered;
        EXPECT_TRUE(slices[rank]->status.ok()) << slices[rank]->status;
        EXPECT_LT(r_->harness().Error(*slices[rank], Pointers(row), {1}, RankHarness::kQueries),
                  kTolerance);
      }
    }
    outcome.took = micros();
    outcome.records = r_->backend().attended_records() - before;
    ++layer_;
    return outcome;
  }

  // All ranks are on time, except for the last one.
  std::vector<int64_t> Last(int64_t delay) const {
    std::vector<int64_t> delays(static_cast<size_t>(r_->ranks()), 0);
    delays.back() = delay;
    return delays;
  }
  uint64_t expired() const { return r_->core().Stats().slice_waits_expired; }
  uint64_t skipped() const { return r_->core().Stats().slice_waits_skipped; }
  uint64_t fused() const { return r_->core().Stats().slices_fused; }
  // Slices that are fused when all but one rank are there.
  uint64_t WithoutOne() const {
    return r_->ranks() == 2 ? 0u : static_cast<uint64_t>(r_->ranks() - 1);
  }

  std::unique_ptr<RankHarness> r_;
  SequenceInfo sequence_;
  int layer_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Ranks, SliceWaitTest, ::testing::Values(2, 4, 8));

TEST_P(SliceWaitTest, ARankThatSendsNothingCostsOneWaitAStep) {
  Begin();
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerOutcome outcome = Layer(Last(kNever));
    EXPECT_EQ(outcome.took, layer == 0 ? kSliceWaitMicros : 0) << "layer " << layer;
    EXPECT_EQ(outcome.records, 1) << "layer " << layer;
  }
  EXPECT_EQ(expired(), 1u);
  EXPECT_EQ(skipped(), kLayers - 1u);
  EXPECT_EQ(fused(), kLayers * WithoutOne());
  ASSERT_TRUE(r_->harness().End(r_->stream(0), kStep)->status.ok());
  // The next step knows nothing of it.
  layer_ = 0;
  ASSERT_TRUE(r_->Begin(kStep, {{sequence_.id, 1, 1, 1}}));
  auto held = r_->Send(0, kStep, 0, Rows(1, 0));
  r_->harness().Run();
  EXPECT_FALSE(held->answered());
}

TEST_P(SliceWaitTest, ARankThatHasNotJoinedCostsOneWaitUntilItJoins) {
  Begin(/*absent=*/1);
  EXPECT_EQ(Layer(Last(kNever)).took, kSliceWaitMicros);
  EXPECT_EQ(Layer(Last(kNever)).took, 0);
  ASSERT_TRUE(r_->Join(r_->ranks() - 1, kStep, {{sequence_.id, 1, 0, 1}}));
  const LayerOutcome together = Layer(Last(50));
  EXPECT_EQ(together.took, 50);
  EXPECT_EQ(together.records, 1);
  EXPECT_EQ(expired(), 1u);
  EXPECT_EQ(skipped(), 1u);
}

TEST_P(SliceWaitTest, ARankWithinTheBoundIsAlwaysWaitedFor) {
  Begin();
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerOutcome outcome = Layer(Last(kSliceWaitMicros - 1));
    EXPECT_EQ(outcome.took, kSliceWaitMicros - 1);
    EXPECT_EQ(outcome.records, 1);
  }
  EXPECT_EQ(expired() + skipped(), 0u);
  EXPECT_EQ(fused(), static_cast<uint64_t>(kLayers * r_->ranks()));
}

TEST_P(SliceWaitTest, ARankThatDragsBehindIsWaitedForOnceAndWaitsForNobody) {
  Begin();
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerOutcome outcome = Layer(Last(kSliceWaitMicros + 100));
    EXPECT_EQ(outcome.waited[0], layer == 0 ? kSliceWaitMicros : 0) << "layer " << layer;
    EXPECT_EQ(outcome.waited.back(), 0) << "layer " << layer;
    EXPECT_EQ(outcome.records, 2) << "layer " << layer;
  }
  EXPECT_EQ(expired(), 1u);
  EXPECT_EQ(skipped(), kLayers - 1u);
}

TEST_P(SliceWaitTest, ARankThatHesitatesOnceIsWaitedForAgain) {
  Begin();
  EXPECT_EQ(Layer(Last(0)).records, 1);
  EXPECT_EQ(Layer(Last(kSliceWaitMicros + 1)).records, 2);
  const LayerOutcome in_time = Layer(Last(20));  // no slice waited for it, and it kept up
  EXPECT_EQ(in_time.records, 2);
  EXPECT_EQ(in_time.took, 20);
  for (int layer = 3; layer < kLayers; ++layer) {
    const LayerOutcome outcome = Layer(Last(20));
    EXPECT_EQ(outcome.records, 1) << "layer " << layer;
    EXPECT_EQ(outcome.took, 20) << "layer " << layer;
  }
  EXPECT_EQ(expired(), 1u);
  EXPECT_EQ(skipped(), 1u);
}

TEST_P(SliceWaitTest, ARankThatComesBackFirstIsFusedAtOnce) {
  Begin();
  EXPECT_EQ(Layer(Last(kNever)).records, 1);
  EXPECT_EQ(Layer(Last(kNever)).records, 1);
  std::vector<int64_t> delays(static_cast<size_t>(r_->ranks()), 30);
  delays.back() = 0;
  const LayerOutcome outcome = Layer(delays);
  EXPECT_EQ(outcome.records, 1);
  EXPECT_EQ(outcome.took, 30);
  EXPECT_EQ(expired(), 1u);
  EXPECT_EQ(skipped(), 1u);
}

TEST_P(SliceWaitTest, TheWriterOfTheRowsMayBeTheLateOne) {
  // No slice can go without its rows, so a late writer does not count as a missed wait.
  Begin();
  for (int layer = 0; layer < kLayers; ++layer) {
    std::vector<int64_t> delays(static_cast<size_t>(r_->ranks()), 0);
    delays[0] = 3 * kSliceWaitMicros;
    const LayerOutcome outcome = Layer(delays);
    EXPECT_EQ(outcome.took, delays[0]);
    EXPECT_EQ(outcome.records, 1);
  }
  EXPECT_EQ(expired() + skipped(), 0u);
}

TEST_P(SliceWaitTest, NobodyIsMissingWhenEveryHeadIsThere) {
  Begin(/*absent=*/1);
  const std::vector<Row> row = Rows(1, 0);
  const int half = kRankHeads / 2;
  for (int layer = 0; layer < kLayers; ++layer) {
    auto low = r_->harness().Slice(r_->stream(0), kStep, layer, 0, 1, row, 0, half, 7);
    auto high = r_->harness().Query(r_->stream(0), kStep, layer, 0, 1, half, half, 7);
    r_->harness().Run();
    ASSERT_TRUE(low->answered() && high->answered()) << "layer " << layer;
  }
  EXPECT_EQ(r_->backend().attended_records(), kLayers);
  EXPECT_EQ(expired() + skipped(), 0u);
}

TEST_P(SliceWaitTest, EveryRangeOfRowsHasItsOwnLatecomer) {
  r_ = std::make_unique<RankHarness>(GetParam(), LimitsOfRanks(), kLayers);
  sequence_ = r_->harness().Open();
  ASSERT_TRUE(r_->Begin(kStep, {{sequence_.id, 1, 0, 2}}));
  const std::vector<Row> rows = Rows(2, 3);
  const int heads = kRankHeads / r_->ranks();
  auto whole = r_->harness().AppendOnly(r_->stream(0), kStep, 0, 0, rows);
  r_->harness().Run();
  const auto send = [&](int rank, int row) {
    auto slice =
        r_->harness().Query(r_->stream(rank), kStep, 0, row, 1, rank * heads, heads, 70000);
    r_->harness().Run();
    return slice;
  };
  // Row 0 of every rank except the last one, then row 1 of all ranks: at row 1 the last rank is
  // still waited for.
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int rank = 0; rank + 1 < r_->ranks(); ++rank) slices.push_back(send(rank, 0));
  for (int rank = 0; rank + 1 < r_->ranks(); ++rank) slices.push_back(send(rank, 1));
  for (const auto& slice : slices) EXPECT_FALSE(slice->answered());
  auto last = send(r_->ranks() - 1, 1);
  EXPECT_TRUE(last->answered());
  EXPECT_TRUE(slices.back()->answered());
  // It has passed row 0, so row 0 does not wait for it any more.
  EXPECT_TRUE(slices.front()->answered());
  EXPECT_EQ(expired() + skipped(), 0u);
}

// Ranks with random delays. A slice waits at most the bound, a slice that comes after its siblings
// does not wait, and every wait that expires is for a rank that was in time before.
TEST_P(SliceWaitTest, AnyTemperCostsAtMostAWaitForEachReturn) {
  std::mt19937_64 random(static_cast<uint64_t>(GetParam()));
  for (int round = 0; round < 60; ++round) {
    layer_ = 0;
    Begin();
    const int kinds = 1 + static_cast<int>(random() % 4);
    std::vector<bool> in_time(static_cast<size_t>(r_->ranks()), true);
    uint64_t gaps = 0;  // how often a rank that was in time stopped being in time
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<int64_t> delays;
      for (int rank = 0; rank < r_->ranks(); ++rank) {
        const int64_t late = kSliceWaitMicros + static_cast<int64_t>(random() % 300);
        const int64_t soon = static_cast<int64_t>(random() % (kSliceWaitMicros / 2));
        const int kind = static_cast<int>(random() % static_cast<uint64_t>(kinds));
        delays.push_back(rank == 0 || kind < 2 ? soon : kind == 2 ? late + 100 : kNever);
      }
      const LayerOutcome outcome = Layer(delays);
      for (int rank = 0; rank < r_->ranks(); ++rank) {
        const bool now = delays[rank] != kNever && delays[rank] < kSliceWaitMicros;
        if (!now && in_time[rank]) ++gaps;
        in_time[rank] = now;
        if (delays[rank] == kNever) continue;
        EXPECT_LE(outcome.waited[rank], kSliceWaitMicros + delays[0]);
        if (!now) {
          EXPECT_EQ(outcome.waited[rank], 0) << "rank " << rank;
        }
      }
    }
    EXPECT_LE(expired(), gaps) << "round " << round;
    if (gaps == 0) {
      EXPECT_EQ(r_->backend().attended_records(), kLayers);
    }
    ASSERT_TRUE(r_->harness().End(r_->stream(0), kStep)->status.ok());
  }
}

}  // namespace
}  // namespace mla::scheduler
