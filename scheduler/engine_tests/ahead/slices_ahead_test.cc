// Slices of tensor-parallel ranks that are handed over before their tensors are there.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/batching/ahead_pauses.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/rank_harness.h"

namespace mla::scheduler {
namespace {

using testing::FaultyBackend;
using testing::kRankHeads;
using testing::kSliceWaitMicros;
using testing::LimitsOfRanks;
using testing::MakeRow;
using testing::Pointers;
using testing::RankHarness;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

constexpr double kTolerance = 2e-5;
constexpr uint64_t kQueries = RankHarness::kQueries;
constexpr int kRanks = 2;
constexpr int kHeads = kRankHeads / kRanks;
constexpr int64_t kAheadUs = 300;
constexpr int kOldRows = 5;
constexpr StepId kStep = 1;

// Says which slices the ranks bring.
enum class Kind {
  kLarge,     // of ABSORBED; each fills the backend's tiles
  kExpanded,  // fused, in EXPANDED
  kSmall      // of ABSORBED, which are fused
};

class SlicesAheadTest : public ::testing::TestWithParam<Kind> {
 protected:
  SlicesAheadTest() : SlicesAheadTest(GetParam()) {}
  explicit SlicesAheadTest(Kind kind)
      : kind_(kind), r_(kRanks, AheadLimits(), 2, [kind](FaultyBackend& backend) {
          backend.SetWaitsForWords();
          backend.SetComputesAtEnd();
          if (kind == Kind::kLarge) backend.SetTileRows(kHeads);
        }) {
    LoadWeights();
    const SequenceInfo sequence = r_.harness().Open();
    EXPECT_TRUE(r_.Fill(sequence, kOldRows));
    EXPECT_TRUE(r_.Begin(kStep, {{sequence.id, 1, kOldRows, 1}}));
  }
  static Limits AheadLimits() {
    Limits limits = LimitsOfRanks();
    limits.ahead_us = kAheadUs;
    return limits;
  }
  void LoadWeights() {
    ModelTable& models = r_.core().models();
    Model* const model = *models.Find(r_.core().FindTenant(r_.harness().tenant()),
                                      r_.harness().model().id, "model_id");
    std::vector<kernels::Bf16> weights(size_t{kRankHeads} * 8 * (6 + 5));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = kernels::ToBf16(MakeRow(i, 1)[0]);
    for (int layer = 0; layer < 2; ++layer) {
      const auto bytes = std::as_bytes(std::span(weights));
      ASSERT_TRUE(models.weights().Load(*model, 1, layer, 0, kRankHeads, bytes).ok());
    }
    ASSERT_TRUE(models.weights().Commit(*model, 1).empty());
  }
  // A slice whose tensors come when the rank's word is layer + 1. Rank 0 brings the row.
  std::unique_ptr<TestRequest> Slice(int rank, int layer) {
    auto request = r_.harness().Unsent(r_.stream(rank), kStep, layer, 0, 1,
                                       rank == 0 ? Fresh() : std::vector<Row>(), rank * kHeads,
                                       kHeads, kQueries);
    if (kind_ == Kind::kExpanded) {
      request->queries.clear();
      for (int head = 0; head < kHeads; ++head) {
        for (const float v : MakeRow(500 + rank * kHeads + head, 10)) {
          request->queries.push_back(kernels::ToBf16(v));
        }
      }
      request->attend.profile = Profile::kExpanded;
      request->attend.q = reinterpret_cast<const std::byte*>(request->queries.data());
      request->output.resize(size_t{kHeads} * 5);
      request->attend.o = reinterpret_cast<std::byte*>(request->output.data());
    }
    std::fill(request->output.begin(), request->output.end(), kNone);
    const auto value = static_cast<uint32_t>(layer) + 1;
    request->attend.ready = {&ready_[rank], value};
    request->attend.done = {&done_[rank], value};
    return request;
  }
  void Submit(TestRequest* request) { r_.harness().Submit(request); }
  void SubmitReady(TestRequest* request) {
    request->attend.ready = {};
    Submit(request);
  }
  static std::vector<Row> Fresh() { return Rows(1, 9); }
  bool Launch() { return r_.core().launches().Start(); }
  bool Complete(bool wait = true) { return r_.core().launches().Complete(wait); }
  EngineStats Stats() { return r_.core().Stats(); }

  // Compares the outputs with the outputs of awaited slices of the same heads.
  void ExpectComputed(const std::unique_ptr<TestRequest>* slices, int layer) {
    std::unique_ptr<TestRequest> awaited[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      awaited[rank] = Slice(rank, layer);
      awaited[rank]->attend.has_kv = false;  // the row is there
      awaited[rank]->attend.done = {};
      SubmitReady(awaited[rank].get());
    }
    r_.harness().Run();
    for (int rank = 0; rank < kRanks; ++rank) {
      const TestRequest& slice = *slices[rank];
      ASSERT_TRUE(slice.status.ok()) << slice.status;
      EXPECT_EQ(slice.handed_back, HandedBack::kNo);
      ASSERT_TRUE(awaited[rank]->status.ok()) << awaited[rank]->status;
      EXPECT_EQ(slice.output, awaited[rank]->output);
      if (kind_ == Kind::kExpanded) continue;
      EXPECT_LT(
          r_.harness().Error(slice, Pointers(Rows(kOldRows, 1), Fresh()), {kOldRows + 1}, kQueries),
          kTolerance);
    }
  }
  static bool Untouched(const TestRequest& slice) {
    return std::all_of(slice.output.begin(), slice.output.end(),
                       [](float value) { return value == kNone; });
  }

  static constexpr float kNone = -1.0f;
  const Kind kind_;
  RankHarness r_;
  uint32_t ready_[kRanks] = {}, done_[kRanks] = {};
};
INSTANTIATE_TEST_SUITE_P(Kinds, SlicesAheadTest, ::testing::Values(Kind::kLarge, Kind::kExpanded),
                         [](const auto& kind) {
                           return kind.param == Kind::kLarge ? "Large" : "Expanded";
                         });

TEST_P(SlicesAheadTest, OneLaunchWaitsForTheTensorsOfAll) {
  for (int layer = 0; layer < 2; ++layer) {
    const auto reached = static_cast<uint32_t>(layer) + 1;
    std::unique_ptr<TestRequest> slices[kRanks];
    // The row comes last, and its rank is the first with tensors in every second layer.
    for (int rank = kRanks - 1; rank >= 0; --rank) {
      slices[rank] = Slice(rank, layer);
      Submit(slices[rank].get());
    }
    EXPECT_TRUE(Launch());
    ready_[layer] = reached;
    EXPECT_FALSE(Complete(/*wait=*/false));
    EXPECT_FALSE(Launch());
    ready_[1 - layer] = reached;
    EXPECT_TRUE(Complete(/*wait=*/false));
    EXPECT_FALSE(Launch());
    EXPECT_EQ(done_[0], reached);
    EXPECT_EQ(done_[1], reached);
    ExpectComputed(slices, layer);
  }
  EXPECT_EQ(Stats().launches_ahead, 2u);
  EXPECT_EQ(Stats().requests_handed_back, 0u);
  EXPECT_TRUE(r_.harness().End(r_.stream(0), kStep)->status.ok());
  EXPECT_EQ(r_.core().answers().owned(), 0);
  EXPECT_EQ(r_.core().cache().CheckInvariants(), "");
}

TEST_P(SlicesAheadTest, IfOneIsLateNothingHasCome) {
  for (int missing = 0; missing < kRanks; ++missing) {
    std::unique_ptr<TestRequest> slices[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      slices[rank] = Slice(rank, missing);
      Submit(slices[rank].get());
    }
    EXPECT_TRUE(Launch());
    const auto reached = static_cast<uint32_t>(missing) + 1;
    ready_[1 - missing] = reached;
    EXPECT_TRUE(Complete());
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(slices[rank]->handed_back, HandedBack::kLate);
      EXPECT_TRUE(Untouched(*slices[rank]));
      EXPECT_EQ(done_[rank], reached - 1);
    }
    // Its row has not been stored: a query of it waits.
    SubmitReady(slices[1].get());
    r_.harness().AdvanceMicros(kSliceWaitMicros);
    EXPECT_FALSE(Launch());
    SubmitReady(slices[0].get());
    r_.harness().Run();
    ExpectComputed(slices, missing);
    r_.harness().AdvanceMicros(AheadPauses::kPauseNanos / 1000);
  }
  EXPECT_EQ(Stats().launches_ahead, 2u);
  EXPECT_TRUE(r_.harness().End(r_.stream(0), kStep)->status.ok());
}

// A launch of it alone would keep the other ranks' slices from the device.
TEST_P(SlicesAheadTest, OneThatIsAloneWaitsForTheOthersAWhile) {
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[0].get());
  EXPECT_FALSE(Launch());
  EXPECT_TRUE(r_.core().steps().queue().AwaitsSlices());
  r_.harness().AdvanceMicros(kAheadUs - 1);
  EXPECT_FALSE(Launch());
  EXPECT_EQ(slices[0]->answers, 0);
  r_.harness().AdvanceMicros(1);
  EXPECT_EQ(slices[0]->handed_back, HandedBack::kBusy);
  EXPECT_FALSE(Launch());
  EXPECT_FALSE(r_.core().steps().queue().AwaitsSlices());
  Submit(slices[1].get());
  EXPECT_FALSE(Launch());
  ready_[0] = ready_[1] = 1;
  SubmitReady(slices[0].get());
  r_.harness().Run();
  ExpectComputed(slices, 0);
  EXPECT_EQ(Stats().launches_ahead, 0u);
}

// One that has its tensors goes like any other: without siblings that do not come in time.
TEST_P(SlicesAheadTest, OneThatIsAloneGoesWhenItsTensorsCome) {
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[0].get());
  EXPECT_FALSE(Launch());
  ready_[0] = 1;
  Launch();
  r_.harness().AdvanceMicros(kSliceWaitMicros);
  r_.harness().Run();
  ASSERT_EQ(slices[0]->answers, 1);
  EXPECT_EQ(done_[0], 1u);
  ready_[1] = 1;
  Submit(slices[1].get());
  r_.harness().Run();
  ExpectComputed(slices, 0);
  EXPECT_EQ(Stats().launches_ahead, 0u);
  EXPECT_EQ(Stats().requests_handed_back, 0u);
}

TEST_P(SlicesAheadTest, OneWithTensorsWaitsForTheOtherOnTheDevice) {
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[0].get());
  Submit(slices[1].get());
  ready_[0] = 1;
  EXPECT_TRUE(Launch());
  EXPECT_FALSE(Complete(/*wait=*/false));
  EXPECT_TRUE(Complete());
  EXPECT_EQ(slices[0]->handed_back, HandedBack::kLate);
  EXPECT_EQ(slices[1]->handed_back, HandedBack::kLate);
  EXPECT_TRUE(Untouched(*slices[0]));
  ready_[1] = 1;
  SubmitReady(slices[0].get());
  SubmitReady(slices[1].get());
  r_.harness().Run();
  ExpectComputed(slices, 0);
}

// It could not be handed back, so it must not wait for a client.
TEST_P(SlicesAheadTest, OneThatIsNotChainedWaitsForNoClient) {
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[1].get());
  SubmitReady(slices[0].get());
  r_.harness().AdvanceMicros(kSliceWaitMicros);
  r_.harness().Run();
  EXPECT_EQ(slices[0]->answers, 1);
  EXPECT_TRUE(slices[0]->status.ok()) << slices[0]->status;
  EXPECT_EQ(slices[1]->handed_back, HandedBack::kBusy);
  SubmitReady(slices[1].get());
  r_.harness().Run();
  ExpectComputed(slices, 0);
}

TEST_P(SlicesAheadTest, OtherClientsHaveLaunchesOfTheirOwn) {
  const StreamId stream = r_.core().steps().OpenStream(r_.harness().tenant());
  const SequenceInfo sequence = r_.harness().Open();
  ASSERT_TRUE(r_.harness().Begin(stream, 2, {{sequence.id, 1, 0, 1}})->status.ok());
  auto other = r_.harness().Unsent(stream, 2, 0, 0, 1, Fresh(), 0, kRankHeads, kQueries);
  uint32_t ready = 0;
  other->attend.ready = {&ready, 1};
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[1].get());
  Submit(other.get());
  Submit(slices[0].get());
  Launch();
  Launch();
  EXPECT_EQ(Stats().launches_ahead, 2u);
  ready = ready_[0] = ready_[1] = 1;
  r_.harness().Run();
  EXPECT_TRUE(other->status.ok()) << other->status;
  ExpectComputed(slices, 0);
  EXPECT_EQ(Stats().requests_handed_back, 0u);
}

class SmallSlicesTest : public SlicesAheadTest {
 protected:
  SmallSlicesTest() : SlicesAheadTest(Kind::kSmall) {}
};

// Their queries would be brought next to each other before they are there.
TEST_F(SmallSlicesTest, SlicesThatAreCopiedTogetherGoWithTheirTensors) {
  std::unique_ptr<TestRequest> slices[kRanks] = {Slice(0, 0), Slice(1, 0)};
  Submit(slices[0].get());
  Submit(slices[1].get());
  EXPECT_FALSE(Launch());
  EXPECT_EQ(slices[0]->handed_back, HandedBack::kBusy);
  EXPECT_EQ(slices[1]->handed_back, HandedBack::kBusy);
  SubmitReady(slices[0].get());
  SubmitReady(slices[1].get());
  r_.harness().Run();
  ExpectComputed(slices, 0);
  EXPECT_GT(Stats().slices_fused, 0u);
  EXPECT_EQ(Stats().launches_ahead, 0u);
}

}  // namespace
}  // namespace mla::scheduler
