// Head slices of tensor-parallel ranks: one KV copy, one launch record, bounded waits.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/rank_harness.h"

namespace mla::scheduler {
namespace {

using testing::FaultPoint;
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

// Outputs and log-sum-exps of heads [head, head + heads) of a request, row by row.
std::vector<float> Results(const TestRequest& request, int head, int heads) {
  const int own = request.attend.num_heads;
  const int first = head - request.attend.head_offset;
  std::vector<float> all;
  for (int row = 0; row < request.attend.row_count; ++row) {
    const float* o = &request.output[size_t(row * own + first) * 8];
    const float* lse = &request.lse[size_t(row * own + first)];
    all.insert(all.end(), o, o + heads * 8);
    all.insert(all.end(), lse, lse + heads);
  }
  return all;
}

class EngineSlicesTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineSlicesTest, ::testing::Values(2, 4, 8));

TEST_P(EngineSlicesTest, RanksShareOneRecordAndOneCopyOfTheRows) {
  const int ranks = GetParam();
  const std::vector<Row> old = Rows(7, 1);
  const std::vector<Row> fresh = Rows(2, 2);
  RankHarness whole(1);
  const SequenceInfo alone = whole.harness().Open();
  ASSERT_TRUE(whole.Fill(alone, 7));
  ASSERT_TRUE(whole.Begin(1, {{alone.id, 1, 7, 2}}));
  const auto all_heads = whole.Send(0, 1, 0, fresh);
  const auto other_layer = whole.Send(0, 1, 1, fresh);
  whole.harness().Run();
  ASSERT_TRUE(all_heads->status.ok()) << all_heads->status;
  ASSERT_TRUE(whole.harness().End(whole.stream(0), 1)->status.ok());

  RankHarness r(ranks);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Fill(seq, 7));
  const int64_t appended = r.backend().appended_rows();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 7, 2}}));
  for (int layer = 0; layer < 2; ++layer) {
    const uint64_t launches = r.core().Stats().launches;
    std::vector<std::unique_ptr<TestRequest>> slices;
    // The rank that brings the rows is not the first to come.
    for (int i = 0; i < ranks; ++i) slices.push_back(r.Send((i + 1) % ranks, 1, layer, fresh));
    r.harness().Run();
    EXPECT_EQ(r.core().Stats().launches, launches + 1);
    EXPECT_EQ(r.backend().attended_records(), layer + 1);
    EXPECT_EQ(r.backend().attended_heads(), (layer + 1) * kRankHeads);
    for (const auto& slice : slices) {
      ASSERT_EQ(slice->answers, 1);
      ASSERT_TRUE(slice->status.ok()) << slice->status;
      EXPECT_EQ(slice->timings.launch_requests, ranks);
      EXPECT_LT(r.harness().Error(*slice, Pointers(old, fresh), {8, 9}, kQueries), kTolerance);
      const int head = slice->attend.head_offset, heads = slice->attend.num_heads;
      EXPECT_EQ(Results(*slice, head, heads), Results(*all_heads, head, heads));
    }
  }
  const auto end = r.harness().End(r.stream(0), 1);
  ASSERT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(end->lengths, std::vector<int64_t>{9});
  EXPECT_EQ(r.backend().appended_rows() - appended, 2 * 2);  // rows x layers, however many ranks
  const EngineStats stats = r.core().Stats();
  EXPECT_EQ(stats.page_groups_used, whole.core().Stats().page_groups_used);
  EXPECT_EQ(stats.slices_fused, uint64_t(2 * ranks));
  EXPECT_EQ(stats.slice_waits_expired, 0u);
}

TEST_P(EngineSlicesTest, ALateSiblingCostsTheBoundAndNobodyElseWaits) {
  const int ranks = GetParam();
  RankHarness r(ranks);
  const SequenceInfo seq = r.harness().Open();
  const SequenceInfo other = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  const std::vector<Row> rows = Rows(2, 2);
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i < ranks - 1; ++i) slices.push_back(r.Send(i, 1, 0, rows));
  r.harness().Run();
  EXPECT_FALSE(slices[0]->answered());
  // Other work goes ahead at the same time.
  ASSERT_TRUE(r.harness().Begin(r.stream(0), 2, {{other.id, 1, 0, 1}})->status.ok());
  const std::vector<Row> single = Rows(1, 9);
  auto ready = r.harness().Attend(r.stream(0), 2, 0, 0, single, 5);
  r.harness().Run();
  ASSERT_TRUE(ready->answered());
  ASSERT_TRUE(ready->status.ok()) << ready->status;
  EXPECT_LT(r.harness().Error(*ready, Pointers(single), {1}, 5), kTolerance);
  EXPECT_FALSE(slices[0]->answered());
  // The engine asks to be woken exactly at the bound.
  EXPECT_EQ(r.core().steps().NextTick(), r.harness().clock().Now() + kSliceWaitMicros * 1000);
  EXPECT_FALSE(r.core().launches().MayStart());
  r.harness().AdvanceMicros(kSliceWaitMicros - 1);
  r.harness().Run();
  EXPECT_FALSE(slices[0]->answered());
  r.harness().AdvanceMicros(1);
  r.harness().Run();
  for (const auto& slice : slices) {
    ASSERT_TRUE(slice->answered());
    ASSERT_TRUE(slice->status.ok()) << slice->status;
    EXPECT_LT(r.harness().Error(*slice, Pointers(rows), {1, 2}, kQueries), kTolerance);
  }
  EXPECT_EQ(r.core().Stats().slice_waits_expired, 1u);
  // The late one does not wait: its siblings are gone.
  auto late = r.Send(ranks - 1, 1, 0, rows);
  r.harness().Run();
  ASSERT_TRUE(late->answered());
  EXPECT_LT(r.harness().Error(*late, Pointers(rows), {1, 2}, kQueries), kTolerance);
  auto layer = r.harness().AppendOnly(r.stream(0), 1, 1, 0, rows);
  r.harness().Run();
  EXPECT_TRUE(r.harness().End(r.stream(0), 1)->status.ok());
}

TEST_P(EngineSlicesTest, ADeadRankEndsTheStepWhileItsSiblingsAreHeld) {
  const int ranks = GetParam();
  RankHarness r(ranks);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  auto held = r.Send(0, 1, 0, Rows(2, 2));
  r.harness().Run();
  ASSERT_FALSE(held->answered());
  r.core().steps().CloseStream(r.stream(ranks - 1));
  ASSERT_EQ(held->answers, 1);
  EXPECT_EQ(held->status.code(), absl::StatusCode::kCancelled) << held->status;
  EXPECT_TRUE(held->step_aborted);
  EXPECT_EQ(r.harness().Get(seq.id).length, 0);
  EXPECT_EQ(r.core().answers().owned(), 0);
  EXPECT_EQ(r.core().cache().CheckInvariants(), "");
  // The survivors' client starts over on what streams it has.
  ASSERT_TRUE(r.harness().Begin(r.stream(0), 2, {{seq.id, 1, 0, 2}})->status.ok());
  const std::vector<Row> rows = Rows(2, 3);
  auto again = r.harness().Attend(r.stream(0), 2, 0, 0, rows, 5);
  r.harness().Run();
  ASSERT_TRUE(again->answered());
  EXPECT_LT(r.harness().Error(*again, Pointers(rows), {1, 2}, 5), kTolerance);
}

TEST_P(EngineSlicesTest, AnAbortedStepAnswersItsHeldSlices) {
  RankHarness r(GetParam());
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  auto held = r.Send(0, 1, 0, Rows(2, 2));
  auto waits = r.harness().Query(r.stream(1), 1, 1, 0, 2, 0, 1, 5);  // of a layer without rows
  r.harness().Run();
  ASSERT_TRUE(r.harness().Abort(r.stream(0), 1)->status.ok());
  for (const auto* request : {held.get(), waits.get()}) {
    ASSERT_EQ(request->answers, 1);
    EXPECT_EQ(request->status.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(request->detail.reason, "step_aborted");
  }
  EXPECT_EQ(r.core().answers().owned(), 0);
}

TEST_P(EngineSlicesTest, AFailedLaunchFailsAllRanksOfTheStep) {
  const int ranks = GetParam();
  RankHarness r(ranks);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  std::vector<std::unique_ptr<TestRequest>> slices;
  r.backend().FailAt(FaultPoint::kWait);
  for (int i = 0; i < ranks; ++i) slices.push_back(r.Send(i, 1, 0, Rows(2, 2)));
  r.harness().Run();
  for (const auto& slice : slices) {
    ASSERT_EQ(slice->answers, 1);
    EXPECT_EQ(slice->detail.reason, "launch_failed");
  }
  EXPECT_FALSE(r.harness().Get(seq.id).in_step);
  EXPECT_EQ(r.core().answers().owned(), 0);
}

TEST_P(EngineSlicesTest, AGroupTooLargeForOneLaunchIsCutByRows) {
  const int ranks = GetParam();
  Limits limits = LimitsOfRanks();
  limits.launch_packed_rows = 3 * kRankHeads;
  RankHarness r(ranks, limits);
  const SequenceInfo a = r.harness().Open();
  const SequenceInfo b = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{a.id, 1, 0, 4}, {b.id, 1, 0, 3}}));
  const std::vector<Row> rows = Rows(7, 2);
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i < ranks; ++i) slices.push_back(r.Send(i, 1, 0, rows));
  r.harness().Run();
  EXPECT_EQ(r.core().Stats().launches, 3u);
  const std::vector<Row> first(rows.begin(), rows.begin() + 4);
  const std::vector<Row> second(rows.begin() + 4, rows.end());
  for (const auto& slice : slices) {
    ASSERT_TRUE(slice->answered());
    ASSERT_TRUE(slice->status.ok()) << slice->status;
    // Rows 0..3 are of one sequence, 4..6 of the other.
    TestRequest part;
    const int heads = slice->attend.num_heads;
    for (const auto& [begin, count, seen] : {std::tuple(0, 4, &first), std::tuple(4, 3, &second)}) {
      part.attend = slice->attend;
      part.attend.row_begin = begin;
      part.attend.row_count = count;
      const auto* o = &slice->output[size_t(begin) * heads * 8];
      part.output.assign(o, o + size_t(count) * heads * 8);
      const auto* lse = &slice->lse[size_t(begin) * heads];
      part.lse.assign(lse, lse + size_t(count) * heads);
      std::vector<int> visible;
      for (int i = 1; i <= count; ++i) visible.push_back(i);
      EXPECT_LT(r.harness().Error(part, Pointers(*seen), visible, kQueries), kTolerance);
    }
  }
  EXPECT_EQ(r.backend().appended_rows(), 7);
}

// Half of the rows went without it: its own slice cannot be fused any more.
TEST_P(EngineSlicesTest, ALateSiblingOfACutGroupGoesAtOnce) {
  const int ranks = GetParam();
  Limits limits = LimitsOfRanks();
  limits.launch_packed_rows = 3 * kRankHeads;
  RankHarness r(ranks, limits);
  const SequenceInfo a = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{a.id, 1, 0, 6}}));
  const std::vector<Row> rows = Rows(6, 2);
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i + 1 < ranks; ++i) slices.push_back(r.Send(i, 1, 0, rows));
  r.harness().AdvanceMicros(kSliceWaitMicros);
  EXPECT_TRUE(r.core().launches().Start());
  r.core().launches().Complete(/*wait=*/true);
  EXPECT_FALSE(slices[0]->answered());
  slices.push_back(r.Send(ranks - 1, 1, 0, rows));
  r.harness().Run();
  for (const auto& slice : slices) EXPECT_TRUE(slice->answered());
  EXPECT_EQ(r.core().Stats().slice_waits_expired, 1u);
}

// The same rows in another dtype: each rank has sent all it will send, so no slice waits.
TEST_P(EngineSlicesTest, RanksOfTwoDtypesDoNotWaitForEachOther) {
  const int ranks = GetParam();
  RankHarness r(ranks);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 1}}));
  const std::vector<Row> rows = Rows(1, 2);
  const int heads = kRankHeads / ranks;
  std::vector<std::unique_ptr<TestRequest>> slices;
  for (int i = 0; i + 1 < ranks; ++i) slices.push_back(r.Send(i, 1, 0, rows));
  r.harness().Run();
  for (const auto& slice : slices) EXPECT_FALSE(slice->answered());
  auto narrow =
      r.harness().Unsent(r.stream(ranks - 1), 1, 0, 0, 1, {}, (ranks - 1) * heads, heads, kQueries);
  std::vector<kernels::Bf16> o(size_t(heads) * 8);
  narrow->attend.o_dtype = kernels::DType::kBf16;
  narrow->attend.o = reinterpret_cast<std::byte*>(o.data());
  r.harness().Submit(narrow.get());
  r.harness().Run();
  EXPECT_TRUE(narrow->answered());
  for (const auto& slice : slices) EXPECT_TRUE(slice->answered());
  EXPECT_EQ(r.core().Stats().slice_waits_expired + r.core().Stats().slice_waits_skipped, 0u);
}

TEST(EngineSlices, ZeroTurnsTheWaitOffAndFusesWhatIsThere) {
  Limits limits = LimitsOfRanks();
  limits.slice_wait_us = 0;
  RankHarness r(4, limits);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 1}}));
  const std::vector<Row> rows = Rows(1, 2);
  auto first = r.Send(0, 1, 0, rows);
  r.harness().Run();
  EXPECT_TRUE(first->answered());
  auto second = r.Send(1, 1, 0, rows);
  auto third = r.Send(3, 1, 0, rows);  // not neighbours
  r.harness().Run();
  EXPECT_TRUE(second->answered());
  EXPECT_TRUE(third->answered());
  EXPECT_LT(r.harness().Error(*second, Pointers(rows), {1}, kQueries), kTolerance);
  EXPECT_LT(r.harness().Error(*third, Pointers(rows), {1}, kQueries), kTolerance);
  EXPECT_EQ(r.backend().attended_records(), 2);
  EXPECT_EQ(r.core().Stats().slices_fused, 2u);
  EXPECT_EQ(r.core().Stats().slice_waits_expired, 0u);
}

TEST(EngineSlices, AShortDeadlineIsNotSpentOnWaiting) {
  RankHarness r(2);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 1}}));
  const std::vector<Row> rows = Rows(1, 2);
  auto done = r.harness().AppendOnly(r.stream(0), 1, 0, 0, rows);
  r.harness().Run();
  ASSERT_TRUE(done->status.ok());
  auto hasty = r.harness().Unsent(r.stream(1), 1, 0, 0, 1, {}, 4, 4, kQueries);
  hasty->attend.timeout_us = 100;
  r.harness().Submit(hasty.get());
  r.harness().Run();
  EXPECT_FALSE(hasty->answered());
  r.harness().AdvanceMicros(50);
  r.harness().Run();
  ASSERT_TRUE(hasty->answered());
  EXPECT_TRUE(hasty->status.ok()) << hasty->status;
}

TEST(EngineSlices, AStepOfOneStreamHoldsNothing) {
  RankHarness r(1);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 1}}));
  const std::vector<Row> rows = Rows(1, 2);
  auto a = r.harness().Slice(r.stream(0), 1, 0, 0, 1, rows, 0, 4, kQueries);
  r.harness().Run();
  EXPECT_TRUE(a->answered());
  EXPECT_LT(r.harness().Error(*a, Pointers(rows), {1}, kQueries), kTolerance);
}

TEST(EngineSlices, SlicesOfOtherRowsLayersOrDtypesStayApart) {
  RankHarness r(2);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  const std::vector<Row> rows = Rows(2, 2);
  auto kv = r.harness().AppendOnly(r.stream(0), 1, 0, 0, rows);
  auto kv_above = r.harness().AppendOnly(r.stream(0), 1, 1, 0, rows);
  r.harness().Run();
  auto a = r.harness().Query(r.stream(0), 1, 0, 0, 2, 0, 4, kQueries);
  auto other_rows = r.harness().Query(r.stream(1), 1, 0, 1, 1, 4, 4, kQueries);
  auto other_layer = r.harness().Query(r.stream(1), 1, 1, 0, 2, 4, 4, kQueries);
  auto same_heads = r.harness().Query(r.stream(1), 1, 0, 0, 2, 2, 4, kQueries);
  auto wider = r.harness().Unsent(r.stream(1), 1, 0, 0, 2, {}, 4, 4, kQueries);
  std::vector<kernels::Bf16> narrow(size_t{2} * 4 * 8);
  wider->attend.o_dtype = kernels::DType::kBf16;
  wider->attend.o = reinterpret_cast<std::byte*>(narrow.data());
  r.harness().Submit(wider.get());
  r.harness().Run();
  // Each rank's slice of layer 0 is there, so none waits for one that would fit better.
  for (const TestRequest* slice : {a.get(), other_rows.get(), same_heads.get(), wider.get()}) {
    EXPECT_TRUE(slice->answered());
  }
  EXPECT_FALSE(other_layer->answered());
  r.harness().AdvanceMicros(kSliceWaitMicros);
  r.harness().Run();
  EXPECT_EQ(r.core().Stats().slices_fused, 0u);
  EXPECT_EQ(r.core().Stats().slice_waits_expired, 1u);
  EXPECT_LT(r.harness().Error(*a, Pointers(rows), {1, 2}, kQueries), kTolerance);
  EXPECT_LT(r.harness().Error(*other_rows, Pointers(rows), {2}, kQueries), kTolerance);
  EXPECT_LT(r.harness().Error(*other_layer, Pointers(rows), {1, 2}, kQueries), kTolerance);
  EXPECT_LT(r.harness().Error(*same_heads, Pointers(rows), {1, 2}, kQueries), kTolerance);
  EXPECT_TRUE(wider->status.ok()) << wider->status;
}

TEST(EngineSlices, ALogSumExpIsHandedToWhomItConcerns) {
  RankHarness r(2);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 2}}));
  const std::vector<Row> rows = Rows(2, 2);
  auto without = r.harness().Unsent(r.stream(0), 1, 0, 0, 2, rows, 0, 4, kQueries);
  without->attend.want_lse = false;
  const std::vector<float> untouched(8, 77.0f);
  without->lse = untouched;
  r.harness().Submit(without.get());
  auto with = r.harness().Query(r.stream(1), 1, 0, 0, 2, 4, 4, kQueries);
  r.harness().Run();
  EXPECT_EQ(r.core().Stats().slices_fused, 2u);
  EXPECT_LT(r.harness().Error(*with, Pointers(rows), {1, 2}, kQueries), kTolerance);
  EXPECT_EQ(without->lse, untouched);
}

TEST(EngineSlices, AMissingWriterIsToldApartFromAMissingSibling) {
  RankHarness r(2);
  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 0, 1}}));
  auto slice = r.Send(1, 1, 0, Rows(1, 2));
  r.harness().AdvanceMicros(kSliceWaitMicros);
  r.harness().Run();
  EXPECT_FALSE(slice->answered());
  // Its rows come after all: both go at once, and were held by nothing but the rows.
  auto writer = r.Send(0, 1, 0, Rows(1, 2));
  r.harness().Run();
  EXPECT_TRUE(slice->answered());
  EXPECT_TRUE(writer->answered());
  EXPECT_EQ(r.core().Stats().slices_fused, 2u);
  auto orphan = r.Send(1, 1, 1, Rows(1, 2));
  r.harness().Advance(testing::TinyLimits().kv_wait_ms);
  r.harness().Run();
  ASSERT_TRUE(orphan->answered());
  EXPECT_EQ(orphan->detail.reason, "kv_rows_missing");
}

TEST(EngineSlices, ProfilesShareTheCopyOfTheRowsAndNotTheRecord) {
  RankHarness r(2);
  EngineCore& core = r.core();
  Model* model = *core.models().Find(core.FindTenant(r.harness().tenant()), r.harness().model().id,
                                     "model_id");
  std::vector<kernels::Bf16> weights(size_t{kRankHeads} * 8 * (6 + 5));
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = kernels::ToBf16(MakeRow(i, 1)[0]);
  }
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(core.models()
                    .weights()
                    .Load(*model, 1, layer, 0, kRankHeads, std::as_bytes(std::span(weights)))
                    .ok());
  }
  ASSERT_TRUE(core.models().weights().Commit(*model, 1).empty());

  const SequenceInfo seq = r.harness().Open();
  ASSERT_TRUE(r.Fill(seq, 5));
  ASSERT_TRUE(r.Begin(1, {{seq.id, 1, 5, 2}}));
  const std::vector<Row> rows = Rows(2, 2);
  std::vector<std::vector<kernels::Bf16>> queries;
  // EXPANDED: [rows, heads, 6 + 4] in, [rows, heads, 5] out.
  const auto expanded = [&](int rank, int head, int heads, bool kv) {
    auto request = r.harness().Unsent(r.stream(rank), 1, 0, 0, 2, kv ? rows : std::vector<Row>(),
                                      head, heads, 0);
    auto& q = queries.emplace_back();
    for (int row = 0; row < 2; ++row) {
      for (int h = head; h < head + heads; ++h) {
        for (const float v : MakeRow(500 + row * 64 + h, 10)) q.push_back(kernels::ToBf16(v));
      }
    }
    request->attend.profile = Profile::kExpanded;
    request->attend.q = reinterpret_cast<const std::byte*>(q.data());
    request->output.assign(size_t{2} * heads * 5, -1.0f);
    request->attend.o = reinterpret_cast<std::byte*>(request->output.data());
    r.harness().Submit(request.get());
    return request;
  };
  const auto all_heads = expanded(0, 0, kRankHeads, true);
  r.harness().Run();
  ASSERT_TRUE(all_heads->status.ok()) << all_heads->status;
  const int64_t records = r.backend().attended_records();
  // Another layer would do as well; here the rows are there already.
  const auto low = expanded(0, 0, 4, false);
  const auto absorbed = r.harness().Query(r.stream(1), 1, 0, 0, 2, 4, 4, kQueries);
  const auto high = expanded(1, 4, 4, false);
  r.harness().AdvanceMicros(kSliceWaitMicros);
  r.harness().Run();
  EXPECT_EQ(r.backend().attended_records() - records, 2);
  EXPECT_EQ(core.Stats().slices_fused, 2u);
  ASSERT_TRUE(absorbed->status.ok()) << absorbed->status;
  EXPECT_LT(r.harness().Error(*absorbed, Pointers(Rows(5, 1), rows), {6, 7}, kQueries), kTolerance);
  for (const auto* part : {low.get(), high.get()}) {
    ASSERT_TRUE(part->status.ok()) << part->status;
    for (int row = 0; row < 2; ++row) {
      for (int i = 0; i < 4 * 5; ++i) {
        const int whole = (row * kRankHeads + part->attend.head_offset) * 5 + i;
        EXPECT_EQ(part->output[row * 4 * 5 + i], all_heads->output[whole]) << row << " " << i;
      }
      EXPECT_EQ(part->lse[row * 4], all_heads->lse[row * kRankHeads + part->attend.head_offset]);
    }
  }
}

}  // namespace
}  // namespace mla::scheduler
