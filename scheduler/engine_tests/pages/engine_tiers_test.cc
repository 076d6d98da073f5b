// Cached rows that leave the pool for host memory and a file, come back, and are computed on. Pages
// of 3 rows, a group each; 256 groups in the pool.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using kvcache::EventKind;
using kvcache::MatchEnd;
using testing::EngineCoreTest;
using testing::kTolerance;
using testing::Pointers;
using testing::Rows;

constexpr int kRows = 60;  // 20 pages

testing::HarnessOptions Options(int host_groups, int file_groups) {
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr};
  options.limits.kv_cache_bytes = 1 << 16;
  options.limits.host_tier_bytes = host_groups * kvcache::kTierBlock;
  options.limits.tier_low_percent = 80;
  options.limits.tier_high_percent = 90;
  options.limits.tier_tenant_percent = 100;
  if (file_groups > 0) {
    const char* const folder = std::getenv("TEST_TMPDIR");
    options.tier_path = std::string(folder == nullptr ? "/tmp" : folder) + "/tier";
    options.limits.file_tier_bytes = file_groups * kvcache::kTierBlock;
  }
  return options;
}

class EngineTiersTest : public EngineCoreTest {
 protected:
  explicit EngineTiersTest(int host_groups = 200, int file_groups = 0)
      : EngineCoreTest(Options(host_groups, file_groups)) {}

  static std::vector<uint32_t> Tokens(int text, int count = kRows) {
    std::vector<uint32_t> tokens(static_cast<size_t>(count));
    std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(text * 1000));
    return tokens;
  }
  PrefixPlan PlanOf(const OpenArgs& args) {
    PrefixPlan plan;
    const TenantKey tenant = h_.core().FindTenant(args.tenant);
    plan.spec = (*h_.core().models().Find(tenant, args.model_id, "model_id"))->spec;
    EXPECT_TRUE(planner_.Fill(args.tenant, args.prefix, 0, 0, &plan).ok());
    return plan;
  }
  // `waits`: for rows in slower tiers, as the engine's own call does.
  SequenceInfo OpenWith(int text, bool waits = true, int count = kRows) {
    OpenArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.prefix.token_ids = Tokens(text, count);
    const PrefixPlan plan = PlanOf(args);
    if (waits) {
      h_.core().sequences().RestorePrefix(args.tenant, plan, 0);
      h_.Run();
    }
    return h_.core().sequences().Open(args, plan).value();
  }
  // Wants the rows of a text back, and does not wait for them.
  void Ask(int text) {
    OpenArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.prefix.token_ids = Tokens(text);
    h_.core().sequences().RestorePrefix(args.tenant, PlanOf(args), 0);
  }
  void Release(const SequenceInfo& sequence) {
    std::vector<SequenceId> absent;
    h_.core().sequences().Release(h_.tenant(), std::vector{sequence.id}, &absent);
    EXPECT_TRUE(absent.empty());
  }
  // Leaves rows of a text in the cache; in layer l they are Rows(kRows, text + l).
  void Leave(int text) {
    const SequenceInfo sequence = OpenWith(text, false);
    for (int row = 0; row < kRows; row += 20) FillFrom(sequence, row, text);
    Release(sequence);
    h_.Run();
  }
  void FillFrom(const SequenceInfo& sequence, int first, int text) {
    auto begin = h_.Begin(stream_, 900, {{sequence.id, 1, first, 20}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    for (int layer = 0; layer < 2; ++layer) {
      const auto all = Rows(kRows, static_cast<uint64_t>(text + layer));
      const std::vector<testing::Row> some(all.begin() + first, all.begin() + first + 20);
      for (int row = 0; row < 20; row += 10) {
        const std::vector<testing::Row> part(some.begin() + row, some.begin() + row + 10);
        requests_.push_back(h_.AppendOnly(stream_, 900, layer, row, part));
      }
    }
    h_.Run();
    ASSERT_TRUE(h_.End(stream_, 900)->status.ok());
    requests_.clear();
  }
  // Computes on the first rows that a sequence has of a text.
  void ExpectRows(const SequenceInfo& sequence, int text) {
    auto begin = h_.Begin(stream_, 1, {{sequence.id, 1, sequence.length, 1}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    const auto fresh = Rows(1, 90);
    for (int layer = 0; layer < 2; ++layer) {
      auto attend = h_.Attend(stream_, 1, layer, 0, fresh, 700);
      h_.Run();
      ASSERT_TRUE(attend->status.ok()) << attend->status;
      auto cached = Rows(kRows, static_cast<uint64_t>(text + layer));
      cached.resize(static_cast<size_t>(sequence.length));
      const int visible = static_cast<int>(sequence.length) + 1;
      EXPECT_LT(h_.Error(*attend, Pointers(cached, fresh), {visible}, 700), kTolerance);
    }
    ASSERT_TRUE(h_.Abort(stream_, 1)->status.ok());
  }
  // Changes memory as a memory fault may.
  void ChangeHostMemory() {
    const auto memory = h_.core().tier_memory();
    for (size_t at = 0; at < memory.size(); at += 100) memory[at] ^= std::byte{1};
  }
  int Events(EventKind kind, kvcache::Tier tier) {
    kvcache::EventLog::Cursor cursor;
    const auto events = h_.core().events()->Read(h_.core().FindTenant(h_.tenant()), 8192, &cursor);
    return static_cast<int>(std::count_if(events.begin(), events.end(), [&](const auto& event) {
      return event.kind == kind && event.tier == tier;
    }));
  }
  // Rows of a text that a probe finds.
  ProbeAnswer Held(int text) {
    ProbeAnswer answer;
    PrefixArgs prefix;
    prefix.token_ids = Tokens(text);
    const TenantKey tenant = h_.core().FindTenant(h_.tenant());
    const ModelSpec& spec = *(*h_.core().models().Find(tenant, h_.model().id, "model_id"))->spec;
    const auto& directory = h_.core().cache().prefixes().directory();
    EXPECT_TRUE(planner_.CountHeld(h_.tenant(), spec, prefix, directory, &answer).ok());
    return answer;
  }
  TierStats Tiers() { return h_.core().Stats().tiers; }
  void TearDown() override { EXPECT_EQ(h_.core().cache().CheckInvariants(), ""); }

  const PrefixPlanner planner_{kvcache::PrefixSecret{}, testing::TinyLimits()};
  std::vector<std::unique_ptr<testing::TestRequest>> requests_;
};

TEST_F(EngineTiersTest, RowsLeaveThePoolAndComeBackAsTheyWere) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  const TierStats away = Tiers();
  EXPECT_GT(away.host.groups, 60);
  EXPECT_EQ(h_.core().Stats().prefix.demoted, static_cast<uint64_t>(away.host.groups));
  EXPECT_EQ(h_.core().Stats().prefix.evicted, 0u);
  EXPECT_GT(Events(EventKind::kDemoted, kvcache::Tier::kPool), 60);
  EXPECT_EQ(Held(0).rows_in_host, kRows);  // the first that left
  const SequenceInfo back = OpenWith(0);
  EXPECT_EQ(Held(0).rows_in_pool, kRows);
  EXPECT_EQ(back.length, kRows);
  EXPECT_EQ(back.matched.end, MatchEnd::kAll);
  ExpectRows(back, 0);
  EXPECT_EQ(Tiers().host.groups_out, 20u);
  EXPECT_EQ(Events(EventKind::kRestored, kvcache::Tier::kHost), 20);
  // It leaves the pool again, and no row is copied again.
  const uint64_t copied = Tiers().host.groups_in;
  Release(back);
  for (int text = 1; text < 6; ++text) Release(OpenWith(10 * text));
  h_.Run();
  EXPECT_LE(Tiers().host.groups_in, copied + 20);
  EXPECT_EQ(Tiers().host.damaged, 0u);
}

TEST_F(EngineTiersTest, AMatchSaysThatRowsAreOnTheirWayWhileTheyAre) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  const SequenceInfo never_asked = OpenWith(0, false);
  EXPECT_EQ(never_asked.length, 0);
  EXPECT_EQ(never_asked.matched.end, MatchEnd::kEvicted);
  Ask(0);
  const SequenceInfo early = OpenWith(0, false);
  EXPECT_EQ(early.length, 0);
  EXPECT_EQ(early.matched.end, MatchEnd::kDeferred);
  const SequenceInfo late = OpenWith(0);
  EXPECT_EQ(late.length, kRows);
}

// Open sequences alone take more than the marks leave, so all that comes back would leave at once.
TEST_F(EngineTiersTest, RowsThatCameBackStayUntilTheyAreMatched) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  for (int text = 0; text < 6; ++text) {
    const SequenceInfo back = OpenWith(10 * text);
    EXPECT_EQ(back.length, kRows) << text;
    EXPECT_EQ(back.matched.end, MatchEnd::kAll) << text;
  }
}

TEST_F(EngineTiersTest, ACopyThatMemoryHasChangedIsDroppedAndNotUsed) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  ChangeHostMemory();
  const SequenceInfo sequence = OpenWith(0);
  EXPECT_EQ(sequence.length, 0);
  EXPECT_EQ(Tiers().host.damaged, 20u);
  EXPECT_EQ(Tiers().host.groups_out, 0u);
  EXPECT_EQ(Events(EventKind::kDamaged, kvcache::Tier::kHost), 20);
  EXPECT_EQ(h_.core().Stats().prefix.evicted, 0u);
  // They can be had again by computing them.
  Leave(0);
  const SequenceInfo again = OpenWith(0);
  EXPECT_EQ(again.length, kRows);
  ExpectRows(again, 0);
}

TEST_F(EngineTiersTest, RowsThatAreComputedOnceMoreTakeThePlaceOfThoseAway) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  const int64_t nodes = h_.core().Stats().prefix.nodes;
  Leave(0);  // its Open does not wait
  EXPECT_EQ(h_.core().Stats().prefix.nodes, nodes);
  ExpectRows(OpenWith(0), 0);
}

TEST_F(EngineTiersTest, AModelThatGoesTakesItsCopiesAlong) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  EXPECT_GT(Tiers().host.groups, 0);
  Ask(0);  // some are on their way back
  ASSERT_TRUE(h_.core().sequences().EvictModel(h_.tenant(), h_.model().id).ok());
  h_.Run();
  EXPECT_EQ(Tiers().host.groups, 0);
  EXPECT_EQ(Tiers().moving, 0);
  EXPECT_EQ(h_.core().Stats().page_groups_cached, 0);
}

TEST_F(EngineTiersTest, AModelThatGoesWhileItsRowsAreWrittenIntoThePool) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  Ask(0);
  h_.core().tiers()->Pump();  // checked, and waiting for a launch
  EXPECT_GT(h_.core().Stats().page_groups_pinned, 0);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
  ASSERT_TRUE(h_.core().sequences().EvictModel(h_.tenant(), h_.model().id).ok());
  h_.Run();
  EXPECT_EQ(Tiers().moving, 0);
  EXPECT_EQ(h_.core().Stats().page_groups_pinned, 0);
}

TEST_F(EngineTiersTest, ASequenceThatIsOpenKeepsItsRowsInThePool) {
  const SequenceInfo open = OpenWith(0, false);
  for (int row = 0; row < kRows; row += 20) FillFrom(open, row, 0);
  for (int text = 1; text < 6; ++text) Leave(10 * text);
  EXPECT_GT(Tiers().host.groups, 0);
  ExpectRows(h_.Get(open.id), 0);
  EXPECT_EQ(Tiers().host.groups_out, 0u);
}

// More are asked for than move at a time; those who asked have gone.
TEST_F(EngineTiersTest, WhatIsNotWantedAnyMoreIsNotMoved) {
  for (int text = 0; text < 8; ++text) Leave(10 * text);
  Ask(0);
  Ask(10);
  EXPECT_EQ(Tiers().moving, static_cast<int32_t>(TierMoves::kMostMoves));
  h_.Advance(2 * h_.core().limits().tier_wait_ms);
  h_.Run();
  EXPECT_EQ(Tiers().host.groups_out, TierMoves::kMostMoves);
  EXPECT_EQ(OpenWith(0, false).length, static_cast<int>(TierMoves::kMostMoves) * 3);
  EXPECT_EQ(OpenWith(0).length, kRows);
}

// A copy is found to be another one only when it is in the pool.
TEST_F(EngineTiersTest, ACopyThatChangesOnItsWayBackIsNotUsed) {
  for (int text = 0; text < 6; ++text) Leave(10 * text);
  Ask(0);
  ChangeHostMemory();  // while the moves wait for a launch
  h_.Run();
  EXPECT_EQ(Tiers().host.damaged, 20u);
  EXPECT_EQ(Tiers().host.groups_out, 0u);
  EXPECT_EQ(h_.core().Stats().page_groups_pinned, 0);
  EXPECT_EQ(OpenWith(0, false).length, 0);
}

class FullTiersTest : public EngineTiersTest {
 protected:
  FullTiersTest() : EngineTiersTest(40, 0) {}
};

TEST_F(FullTiersTest, TheOldestGoesWhereTheTierIsFull) {
  for (int text = 0; text < 8; ++text) Leave(10 * text);
  EXPECT_LE(Tiers().host.groups, 40);
  EXPECT_GT(Tiers().host.dropped, 0u);
  EXPECT_GT(Events(EventKind::kEvicted, kvcache::Tier::kHost), 0);
  const SequenceInfo oldest = OpenWith(0);
  EXPECT_LT(oldest.length, kRows);
  EXPECT_NE(oldest.matched.end, MatchEnd::kAll);
}

class FileTierTest : public EngineTiersTest {
 protected:
  FileTierTest() : EngineTiersTest(45, 200) {}
  // Uses a text a second time, so that the file takes it.
  void Use(int text) { Release(OpenWith(text)); }
};

TEST_F(FileTierTest, RowsThatWereUsedAgainGoToTheFileAndComeBack) {
  Leave(0);
  Use(0);
  for (int text = 1; text < 8; ++text) Leave(10 * text);
  const TierStats away = Tiers();
  EXPECT_EQ(away.file.groups, 20);  // the others were used once
  EXPECT_GT(away.host.dropped, 0u);
  const SequenceInfo back = OpenWith(0);
  EXPECT_EQ(back.length, kRows);
  EXPECT_EQ(Tiers().file.groups_out, 20u);
  EXPECT_EQ(Events(EventKind::kRestored, kvcache::Tier::kFile), 20);
  ExpectRows(back, 0);
}

// Its seal was valid when it had been read, but the bytes written into the pool were not.
TEST_F(FileTierTest, ACopyOfTheFileThatChangesInMemoryIsReadOnceMore) {
  Leave(0);
  Use(0);
  for (int text = 1; text < 8; ++text) Leave(10 * text);
  Ask(0);
  h_.core().tiers()->Pump();
  ChangeHostMemory();  // while the moves wait for a launch
  h_.Run();
  EXPECT_EQ(Tiers().host.damaged, TierMoves::kMostMoves);
  EXPECT_EQ(Tiers().file.groups_out, 20u);
  const SequenceInfo back = OpenWith(0, false);
  EXPECT_EQ(back.length, kRows);
  ExpectRows(back, 0);
}

TEST_F(FileTierTest, AFileThatWasChangedIsFoundOut) {
  Leave(0);
  Use(0);
  for (int text = 1; text < 8; ++text) Leave(10 * text);
  const std::string path = Options(45, 200).tier_path;
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  for (int64_t at = kvcache::TierFile::kHeaderBytes + 50; at < size; at += kvcache::kTierBlock) {
    file.seekp(at);
    file.put('!');
  }
  file.close();
  const SequenceInfo back = OpenWith(0);
  EXPECT_EQ(back.length, 0);
  EXPECT_EQ(Tiers().file.damaged, 20u);
  EXPECT_EQ(Events(EventKind::kDamaged, kvcache::Tier::kFile), 20);
}

}  // namespace
}  // namespace mla::scheduler
