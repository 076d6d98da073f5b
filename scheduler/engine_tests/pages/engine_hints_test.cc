// Hints for cached rows, and the answers to them. Pages of 3 rows, a group each; 256 groups in the
// pool. All tenants together may pin 128 of them, and one tenant 64.
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/engine_fixture.h"
#include "scheduler/testing/faulty_backend.h"

namespace mla::scheduler {
namespace {

using kvcache::MatchEnd;
using testing::EngineCoreTest;
using testing::Rows;

constexpr int kRows = 24;  // 8 pages, in one step

testing::HarnessOptions Options(int host_groups,
                                std::unique_ptr<kernels::AttentionBackend> backend) {
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), std::move(backend)};
  options.limits.kv_cache_bytes = 1 << 16;
  options.limits.host_tier_bytes = host_groups * kvcache::kTierBlock;
  options.limits.tier_low_percent = 0;
  options.limits.tier_high_percent = 0;
  return options;
}

class EngineHintsTest : public EngineCoreTest {
 protected:
  explicit EngineHintsTest(int host_groups = 0,
                           std::unique_ptr<kernels::AttentionBackend> backend = nullptr)
      : EngineCoreTest(Options(host_groups, std::move(backend))) {}

  HintArgs Args(HintKind kind, int text, int count = kRows) {
    HintArgs args;
    args.tenant = h_.tenant();
    args.kind = kind;
    args.model_id = h_.model().id;
    args.prefix.token_ids.resize(static_cast<size_t>(count));
    std::iota(args.prefix.token_ids.begin(), args.prefix.token_ids.end(),
              static_cast<uint32_t>(text * 1000));
    return args;
  }
  PrefixPlan PlanOf(const PrefixArgs& prefix) {
    PrefixPlan plan;
    const TenantKey tenant = h_.core().FindTenant(h_.tenant());
    plan.spec = (*h_.core().models().Find(tenant, h_.model().id, "model_id"))->spec;
    EXPECT_TRUE(planner_.Fill(h_.tenant(), prefix, 0, 0, &plan).ok());
    return plan;
  }
  absl::StatusOr<HintAnswer> TryHint(const HintArgs& args) {
    return h_.core().sequences().Hint(args, args.id == 0 ? PlanOf(args.prefix) : PrefixPlan());
  }
  HintAnswer Hint(const HintArgs& args) { return TryHint(args).value(); }
  HintAnswer Pin(int text, int64_t ttl_ms, int count = kRows) {
    HintArgs args = Args(HintKind::kPin, text, count);
    args.ttl_ms = ttl_ms;
    return Hint(args);
  }
  SequenceInfo OpenWith(const PrefixArgs& prefix) {
    OpenArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.prefix = prefix;
    return h_.core().sequences().Open(args, PlanOf(prefix)).value();
  }
  SequenceInfo OpenWith(int text) { return OpenWith(Args(HintKind::kPin, text).prefix); }
  void Release(const SequenceInfo& sequence) {
    std::vector<SequenceId> absent;
    h_.core().sequences().Release(h_.tenant(), std::vector{sequence.id}, &absent);
    h_.Run();
  }
  // Leaves the rows of a text in the cache.
  void Leave(int text) { Leave(Args(HintKind::kPin, text).prefix); }
  void Leave(const PrefixArgs& prefix) {
    const SequenceInfo sequence = OpenWith(prefix);
    if (sequence.length == 0) Fill(sequence);
    Release(sequence);
  }
  void Fill(const SequenceInfo& sequence, int first = 0) {
    auto begin = h_.Begin(stream_, 900, {{sequence.id, 1, first, kRows}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    std::vector<std::unique_ptr<testing::TestRequest>> requests;
    for (int layer = 0; layer < 2; ++layer) {
      for (int row = 0; row < kRows; row += 12) {
        requests.push_back(h_.AppendOnly(stream_, 900, layer, row, Rows(12, 50)));
      }
    }
    h_.Run();
    ASSERT_TRUE(h_.End(stream_, 900)->status.ok());
  }
  // Leaves enough texts to push out everything that is not kept.
  void Flood() {
    for (int text = 100; text < 140; ++text) Leave(text);
  }
  bool IsCached(int text) {
    const SequenceInfo sequence = OpenWith(text);
    Release(sequence);
    return sequence.length == kRows;
  }
  void TearDown() override { EXPECT_EQ(h_.core().cache().CheckInvariants(), ""); }

  const PrefixPlanner planner_{kvcache::PrefixSecret{}, testing::TinyLimits()};
};

TEST_F(EngineHintsTest, PinnedRowsStayUntilTheirTimeIsUp) {
  Leave(0);
  Leave(1);
  const HintAnswer answer = Pin(0, 5000);
  EXPECT_EQ(answer.outcome, HintOutcome::kAccepted);
  EXPECT_EQ(answer.rows_done, kRows);
  Flood();
  EXPECT_TRUE(IsCached(0));
  EXPECT_FALSE(IsCached(1));
  h_.Advance(4999);
  Flood();
  EXPECT_TRUE(IsCached(0));
  h_.Advance(1);
  Flood();
  EXPECT_FALSE(IsCached(0));
}

TEST_F(EngineHintsTest, APinIsTakenBackOrGivenMoreTime) {
  Leave(0);
  Pin(0, 5000);
  EXPECT_EQ(Pin(0, 9000).outcome, HintOutcome::kAccepted);
  h_.Advance(6000);
  Flood();
  EXPECT_TRUE(IsCached(0));
  EXPECT_EQ(Pin(0, 0).outcome, HintOutcome::kAccepted);
  Flood();
  EXPECT_FALSE(IsCached(0));
  // Its end, which comes later, is of nothing.
  h_.Advance(6000);
}

TEST_F(EngineHintsTest, WhatATenantPinsIsBounded) {
  int64_t done = 0;
  for (int text = 0; text < 12; ++text) {
    Leave(text);
    const HintAnswer answer = Pin(text, 5000);
    done += answer.rows_done;
    if (answer.outcome == HintOutcome::kAccepted) continue;
    EXPECT_STREQ(answer.reason, "pins_exhausted");
    EXPECT_EQ(answer.outcome, answer.rows_done > 0 ? HintOutcome::kClipped : HintOutcome::kRefused);
  }
  EXPECT_EQ(done, 63 * 3);  // a quarter of the pool, in whole hundredths
  // Pinning rows that are pinned takes no more room.
  EXPECT_EQ(Pin(0, 5000).outcome, HintOutcome::kAccepted);
  h_.Advance(5000);
  EXPECT_EQ(Pin(11, 5000).outcome, HintOutcome::kAccepted);
}

TEST_F(EngineHintsTest, RowsOfPriorityArePassedOver) {
  Leave(0);
  HintArgs args = Args(HintKind::kRetain, 0);
  args.priority = 1;
  EXPECT_EQ(Hint(args).outcome, HintOutcome::kAccepted);
  // 31 more texts fill the pool. The next one takes the room of the oldest that is not passed over.
  for (int text = 100; text <= 131; ++text) Leave(text);
  EXPECT_TRUE(IsCached(0));
  EXPECT_FALSE(IsCached(100));
  for (int text = 200; text <= 231; ++text) Leave(text);
  EXPECT_FALSE(IsCached(0));
}

TEST_F(EngineHintsTest, RowsThatAreNotThereAreSaidToBeAbsent) {
  Leave(0);
  HintAnswer answer = Hint(Args(HintKind::kRetain, 7));
  EXPECT_EQ(answer.outcome, HintOutcome::kRefused);
  EXPECT_STREQ(answer.reason, "absent");
  EXPECT_EQ(answer.rows, kRows);
  HintArgs longer = Args(HintKind::kPrefetch, 0, kRows + 6);
  answer = Hint(longer);
  EXPECT_EQ(answer.outcome, HintOutcome::kClipped);
  EXPECT_EQ(answer.rows_done, kRows);
  EXPECT_STREQ(answer.reason, "absent");
  EXPECT_STREQ(Hint(Args(HintKind::kDemote, 0)).reason, "no_tiers");
}

TEST_F(EngineHintsTest, ASequenceNamesItsDeclaredRows) {
  const SequenceInfo sequence = OpenWith(0);
  HintArgs args;
  args.tenant = h_.tenant();
  args.kind = HintKind::kPin;
  args.id = sequence.id;
  args.expected_epoch = 1;
  args.ttl_ms = 5000;
  EXPECT_EQ(Hint(args).rows, 0);
  Fill(sequence);
  EXPECT_EQ(Hint(args).rows_done, kRows);
  Release(sequence);
  Flood();
  EXPECT_TRUE(IsCached(0));
  EXPECT_EQ(TryHint(args).status().code(), absl::StatusCode::kNotFound);
  const SequenceInfo other = OpenWith(1);
  args.id = other.id;
  args.expected_epoch = 2;
  EXPECT_EQ(DetailOf(TryHint(args).status()).reason, "epoch_mismatch");
}

class TierHintsTest : public EngineHintsTest {
 protected:
  TierHintsTest() : EngineHintsTest(200) {}
};

TEST_F(TierHintsTest, RowsGoAndComeBackWhenTheyAreTold) {
  Leave(0);
  HintAnswer answer = Hint(Args(HintKind::kDemote, 0));
  EXPECT_EQ(answer.outcome, HintOutcome::kDeferred);
  EXPECT_EQ(answer.rows_deferred, kRows);
  h_.Run();
  EXPECT_EQ(Hint(Args(HintKind::kDemote, 0)).outcome, HintOutcome::kAccepted);
  EXPECT_EQ(h_.core().Stats().page_groups_cached, 0);
  EXPECT_EQ(OpenWith(0).matched.end, MatchEnd::kEvicted);  // no call has asked for them
  for (int repeat = 0; repeat < 2; ++repeat) {
    answer = Hint(Args(HintKind::kPrefetch, 0));
    EXPECT_EQ(answer.outcome, HintOutcome::kDeferred);
    EXPECT_EQ(answer.rows_deferred, kRows);
    EXPECT_EQ(OpenWith(0).matched.end, MatchEnd::kDeferred);
  }
  h_.Run();
  EXPECT_EQ(Hint(Args(HintKind::kPrefetch, 0)).outcome, HintOutcome::kAccepted);
  EXPECT_EQ(OpenWith(0).length, kRows);
  // Now a sequence holds them.
  answer = Hint(Args(HintKind::kDemote, 0));
  EXPECT_EQ(answer.outcome, HintOutcome::kRefused);
  EXPECT_STREQ(answer.reason, "in_use");
}

TEST_F(TierHintsTest, RowsStayAwayWhereThePoolHasNoRoomForThem) {
  Leave(0);
  Hint(Args(HintKind::kDemote, 0));
  h_.Run();
  // Open sequences take all 256 groups.
  std::vector<SequenceInfo> open;
  for (int i = 0; i < 8; ++i) {
    open.push_back(h_.Open());
    for (int row = 0; row < 96; row += kRows) Fill(open.back(), row);
  }
  for (const HintAnswer& answer : {Hint(Args(HintKind::kPrefetch, 0)), Pin(0, 5000)}) {
    EXPECT_EQ(answer.outcome, HintOutcome::kRefused);
    EXPECT_STREQ(answer.reason, "no_room");
    EXPECT_EQ(answer.rows_done + answer.rows_deferred, 0);
  }
  Release(open[0]);
  EXPECT_EQ(Hint(Args(HintKind::kPrefetch, 0)).rows_deferred, kRows);
  h_.Run();
  EXPECT_EQ(Pin(0, 5000).outcome, HintOutcome::kAccepted);
}

TEST_F(TierHintsTest, RowsOfThePoolAreFoundBesideLongerOnesThatStayAway) {
  Leave(0);
  Hint(Args(HintKind::kDemote, 0));
  h_.Run();
  PrefixArgs other = Args(HintKind::kPin, 0).prefix;
  for (size_t i = 2; i < other.token_ids.size(); ++i) other.token_ids[i] += 500;
  Leave(other);
  const SequenceInfo sequence = OpenWith(0);
  EXPECT_EQ(sequence.length, 2);
  EXPECT_EQ(sequence.matched.end, MatchEnd::kEvicted);
}

TEST_F(TierHintsTest, APartOfAPageThatIsComputedOnceMoreIsInThePoolAgain) {
  const HintArgs demote = Args(HintKind::kDemote, 0, kRows - 1);
  Leave(demote.prefix);
  Hint(demote);
  h_.Run();
  EXPECT_EQ(h_.core().Stats().page_groups_cached, 0);
  const int64_t nodes = h_.core().Stats().prefix.nodes;
  Leave(demote.prefix);
  EXPECT_EQ(OpenWith(demote.prefix).length, kRows - 1);
  EXPECT_EQ(h_.core().Stats().prefix.nodes, nodes);
}

TEST_F(TierHintsTest, APinBringsRowsBackFirst) {
  Leave(0);
  Hint(Args(HintKind::kDemote, 0));
  h_.Run();
  EXPECT_EQ(Pin(0, 5000).outcome, HintOutcome::kDeferred);
  h_.Run();
  EXPECT_EQ(Pin(0, 5000).outcome, HintOutcome::kAccepted);
  EXPECT_STREQ(Hint(Args(HintKind::kDemote, 0)).reason, "in_use");
  Flood();
  EXPECT_TRUE(IsCached(0));
}

class FaultyTierHintsTest : public EngineHintsTest {
 protected:
  FaultyTierHintsTest()
      : FaultyTierHintsTest(std::make_unique<testing::FaultyBackend>(
            std::make_unique<kernels::ReferenceBackend>())) {}

  testing::FaultyBackend* const faults_;

 private:
  explicit FaultyTierHintsTest(std::unique_ptr<testing::FaultyBackend> backend)
      : FaultyTierHintsTest(backend.get(), std::move(backend)) {}
  FaultyTierHintsTest(testing::FaultyBackend* faults,
                      std::unique_ptr<testing::FaultyBackend>&& backend)
      : EngineHintsTest(200, std::move(backend)), faults_(faults) {}
};

TEST_F(FaultyTierHintsTest, NothingLeavesForASecondAfterALaunchThatFailed) {
  Leave(0);
  Leave(1);
  EXPECT_EQ(Hint(Args(HintKind::kDemote, 0)).outcome, HintOutcome::kDeferred);
  faults_->FailAt(testing::FaultPoint::kSubmit);
  h_.Run();
  HintAnswer answer = Hint(Args(HintKind::kDemote, 1));
  EXPECT_EQ(answer.outcome, HintOutcome::kRefused);
  EXPECT_STREQ(answer.reason, "no_room");
  EXPECT_TRUE(IsCached(0));
  EXPECT_TRUE(IsCached(1));
  h_.Advance(TierMoves::kRetryMs);
  answer = Hint(Args(HintKind::kDemote, 1));
  EXPECT_EQ(answer.outcome, HintOutcome::kDeferred);
  h_.Run();
  EXPECT_EQ(Hint(Args(HintKind::kDemote, 1)).outcome, HintOutcome::kAccepted);
}

}  // namespace
}  // namespace mla::scheduler
