// Sequences that take rows of others from the prefix cache, and compute on them. Pages of 3 rows.
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/status_macros.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineCoreTest;
using testing::kTolerance;
using testing::Pointers;
using testing::Rows;

std::vector<uint32_t> Tokens(int count, uint32_t first = 1) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class EnginePrefixTest : public EngineCoreTest {
 protected:
  OpenArgs Args(std::vector<uint32_t> tokens, const std::string& salt = "") {
    OpenArgs args;
    args.tenant = h_.tenant();
    args.model_id = h_.model().id;
    args.prefix.token_ids = std::move(tokens);
    args.prefix.salt = salt;
    return args;
  }
  absl::StatusOr<SequenceInfo> TryOpen(const OpenArgs& args) {
    PrefixPlan plan;
    const TenantKey tenant = h_.core().FindTenant(args.tenant);
    plan.spec = (*h_.core().models().Find(tenant, args.model_id, "model_id"))->spec;
    absl::Status status = planner_.Fill(args.tenant, args.prefix, 0, 0, &plan);
    return status.ok() ? h_.core().sequences().Open(args, plan) : status;
  }
  SequenceInfo OpenWith(std::vector<uint32_t> tokens, const std::string& salt = "") {
    return TryOpen(Args(std::move(tokens), salt)).value();
  }
  absl::StatusOr<SequenceInfo> Match(const SequenceInfo& sequence, int64_t first_row,
                                     std::vector<uint32_t> tokens, uint64_t epoch = 1) {
    MatchArgs args;
    args.tenant = h_.tenant();
    args.id = sequence.id;
    args.expected_epoch = epoch;
    args.first_row = first_row;
    args.prefix.token_ids = std::move(tokens);
    int64_t committed = 0;
    MLA_ASSIGN_OR_RETURN(PrefixPlan plan, h_.core().sequences().PlanMatch(args, &committed));
    MLA_RETURN_IF_ERROR(planner_.Fill(args.tenant, args.prefix, first_row, committed, &plan));
    return h_.core().sequences().Match(args, plan);
  }
  void Release(const SequenceInfo& sequence) {
    std::vector<SequenceId> absent;
    h_.core().sequences().Release(h_.tenant(), std::vector{sequence.id}, &absent);
    EXPECT_TRUE(absent.empty());
  }
  int64_t Declared() {
    return h_.core().tenants().Usage(h_.tenant()).used[Resource::kPrefixTokens];
  }

  const PrefixPlanner planner_{kvcache::PrefixSecret{}, testing::TinyLimits()};
};

TEST_F(EnginePrefixTest, RowsOfAnotherSequenceAreComputedOn) {
  const SequenceInfo first = OpenWith(Tokens(7));
  EXPECT_EQ(first.matched.end, kvcache::MatchEnd::kAbsent);
  Fill(first, 7, 50);
  Release(first);
  const SequenceInfo second = OpenWith(Tokens(9));
  EXPECT_EQ(second.length, 7);
  EXPECT_EQ(second.declared, 9);
  EXPECT_EQ(second.matched.rows, 7);
  auto begin = h_.Begin(stream_, 1, {{second.id, 1, 7, 1}});
  ASSERT_TRUE(begin->status.ok()) << begin->status;
  const auto fresh = Rows(1, 90);
  for (int layer = 0; layer < 2; ++layer) {
    auto attend = h_.Attend(stream_, 1, layer, 0, fresh, 700);
    h_.Run();
    ASSERT_TRUE(attend->status.ok()) << attend->status;
    const auto cached = Rows(7, static_cast<uint64_t>(50 + layer));
    EXPECT_LT(h_.Error(*attend, Pointers(cached, fresh), {8}, 700), kTolerance);
  }
  ASSERT_TRUE(h_.End(stream_, 1)->status.ok());
  EXPECT_EQ(h_.core().Stats().prefix.hits, 1u);
  EXPECT_EQ(h_.core().Stats().prefix.rows_found, 7u);
}

TEST_F(EnginePrefixTest, NothingIsFoundBeforeItIsCommitted) {
  const SequenceInfo first = OpenWith(Tokens(6));
  auto begin = h_.Begin(stream_, 900, {{first.id, 1, 0, 6}});
  auto a = h_.AppendOnly(stream_, 900, 0, 0, Rows(6, 50));
  h_.Run();
  EXPECT_EQ(OpenWith(Tokens(6)).length, 0);
  auto b = h_.AppendOnly(stream_, 900, 1, 0, Rows(6, 51));
  h_.Run();
  EXPECT_EQ(OpenWith(Tokens(6)).length, 0);
  ASSERT_TRUE(h_.End(stream_, 900)->status.ok());
  EXPECT_EQ(OpenWith(Tokens(6)).length, 6);
}

TEST_F(EnginePrefixTest, SaltsKeepRowsApart) {
  const SequenceInfo first = OpenWith(Tokens(6), "a");
  Fill(first, 6, 50);
  EXPECT_EQ(OpenWith(Tokens(6), "b").length, 0);
  EXPECT_EQ(OpenWith(Tokens(6)).length, 0);
  EXPECT_EQ(OpenWith(Tokens(6), "a").length, 6);
}

TEST_F(EnginePrefixTest, ModelsOfEqualContentsFindEachOthersRows) {
  ModelTable& models = h_.core().models();
  const TenantKey tenant = h_.core().FindTenant(h_.tenant());
  ModelSpec spec = h_.model();
  ASSERT_EQ(models.Unregister(tenant, spec.id), absl::OkStatus());
  spec.weights_digest = std::string(kWeightsDigestBytes, 'd');
  const auto add = [&](TenantKey key, const char* id) {
    spec.id = id;
    ASSERT_TRUE(models.Register(key, spec).ok());
  };
  const auto open = [&](const std::string& of, const char* id, const std::string& salt = "") {
    OpenArgs args = Args(Tokens(7), salt);
    args.tenant = of;
    args.model_id = id;
    return TryOpen(args).value();
  };
  add(tenant, "tiny");
  add(tenant, "second");
  const SequenceInfo first = open(h_.tenant(), "tiny");
  Fill(first, 7, 50);
  Release(first);
  SequenceInfo second = open(h_.tenant(), "second");
  EXPECT_EQ(second.length, 7);
  EXPECT_EQ(second.model_id, "second");
  EXPECT_EQ(open(h_.tenant(), "second", "salted").length, 0);
  // Events of each sequence name its own model.
  kvcache::EventLog& events = *h_.core().events();
  kvcache::EventLog::Cursor cursor = events.Begin();
  for (const kvcache::Event& event : events.Read(tenant, 100, &cursor)) {
    EXPECT_EQ(*event.model, "tiny");
  }
  EXPECT_EQ(*events.Misses(tenant, 1).at(0).model, "second");
  // The rows stay with the model that is left, and only a model without sequences goes.
  EXPECT_EQ(models.Unregister(tenant, "second").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(models.Unregister(tenant, "tiny"), absl::OkStatus());
  EXPECT_EQ(open(h_.tenant(), "second").length, 7);
  // The same tokens find nothing in another tenant.
  const TenantRef other = *h_.core().tenants().Enter("other");
  add(other->key(), "second");
  EXPECT_EQ(open("other", "second").length, 0);
}

TEST_F(EnginePrefixTest, RowsMayBeDeclaredAfterTheyWereWritten) {
  const SequenceInfo first = h_.Open();
  Fill(first, 5, 50);
  EXPECT_EQ(OpenWith(Tokens(5)).length, 0);
  ASSERT_TRUE(Match(first, 0, Tokens(5)).ok());
  EXPECT_EQ(OpenWith(Tokens(5)).length, 3);
  const auto more = Match(first, 4, Tokens(4, 5));  // tokens 5..8, of which it has the first
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(more->declared, 8);
  Fill(first, 1, 60);
  EXPECT_EQ(OpenWith(Tokens(8)).length, 6);
}

TEST_F(EnginePrefixTest, AMatchOfAnOpenSequenceAddsWhatFollows) {
  const SequenceInfo first = OpenWith(Tokens(9));
  Fill(first, 9, 50);
  const SequenceInfo second = OpenWith(Tokens(3));
  EXPECT_EQ(second.length, 3);
  const auto more = Match(second, 3, Tokens(6, 4));
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(more->length, 9);
  EXPECT_EQ(more->matched.rows, 6);
  EXPECT_EQ(Match(second, 3, Tokens(6, 4))->length, 9);  // a repeat
}

TEST_F(EnginePrefixTest, WhatWasSaidOfCommittedRowsStays) {
  const SequenceInfo first = OpenWith(Tokens(5));
  Fill(first, 4, 50);
  const auto other = Match(first, 2, Tokens(2, 70));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(other.status()).reason, "prefix_differs");
  EXPECT_TRUE(Match(first, 4, Tokens(2, 70)).ok());  // of a future row
  EXPECT_EQ(Match(first, 7, Tokens(2)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(Match(first, 0, Tokens(6), 2).status()).reason, "epoch_mismatch");
}

TEST_F(EnginePrefixTest, ARepeatedOpenGivesTheSameSequence) {
  OpenArgs args = Args(Tokens(6));
  args.request_id = "r";
  const auto first = TryOpen(args);
  const auto again = TryOpen(args);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(first->id, again->id);
  args.prefix.token_ids[5] = 99;
  EXPECT_EQ(TryOpen(args).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(EnginePrefixTest, RowsThatAreNotFiniteAreNotShared) {
  const SequenceInfo first = OpenWith(Tokens(9));
  auto begin = h_.Begin(stream_, 900, {{first.id, 1, 0, 9}});
  auto rows = Rows(9, 50);
  rows[4][0] = std::numeric_limits<float>::quiet_NaN();
  auto a = h_.AppendOnly(stream_, 900, 0, 0, Rows(9, 51));
  auto b = h_.AppendOnly(stream_, 900, 1, 0, rows);
  h_.Run();
  ASSERT_TRUE(h_.End(stream_, 900)->status.ok());
  EXPECT_EQ(OpenWith(Tokens(9)).length, 3);
  Release(first);
  EXPECT_EQ(OpenWith(Tokens(9)).length, 4);
}

TEST_F(EnginePrefixTest, DeclaredRowsAreBounded) {
  const SequenceInfo first = OpenWith(Tokens(8));
  EXPECT_EQ(Declared(), 8);
  TenantQuota quota;
  quota.bounds[Resource::kPrefixTokens] = 10;
  ASSERT_TRUE(h_.core().tenants().SetQuota(h_.tenant(), quota, false).ok());
  const auto refused = TryOpen(Args(Tokens(3)));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(refused.status()).reason, "prefix_tokens_exhausted");
  EXPECT_EQ(Match(first, 8, Tokens(3)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Declared(), 8);
  EXPECT_TRUE(Match(first, 8, Tokens(2)).ok());
  Release(first);
  EXPECT_EQ(Declared(), 0);
  EXPECT_EQ(h_.core().tenants().Usage(h_.tenant()).used[Resource::kSequences], 0);
}

TEST_F(EnginePrefixTest, CachedRowsGoWithTheirModel) {
  const SequenceInfo first = OpenWith(Tokens(6));
  Fill(first, 6, 50);
  Release(first);
  EXPECT_EQ(h_.core().Stats().page_groups_cached, 2);
  ASSERT_TRUE(h_.core().models().Unregister(h_.core().FindTenant(h_.tenant()), h_.model().id).ok());
  EXPECT_EQ(h_.core().Stats().page_groups_cached, 0);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

TEST_F(EnginePrefixTest, EventsAreOfTheTenantThatTheModelBelongsTo) {
  kvcache::EventLog& log = *h_.core().events();
  const TenantKey tenant = h_.core().FindTenant(h_.tenant());
  kvcache::EventLog::Cursor cursor = log.End();
  const SequenceInfo first = OpenWith(Tokens(6));
  Fill(first, 6, 50);
  std::vector<kvcache::Event> events = log.Read(tenant, 100, &cursor);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].kind, kvcache::EventKind::kStored);
  EXPECT_EQ(events[1].sequence, first.id);
  EXPECT_EQ(*events[1].model, h_.model().id);
  h_.Advance(60000);
  events = log.Read(tenant, 100, &cursor);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, kvcache::EventKind::kExpired);
  EXPECT_EQ(events[0].sequence, first.id);
  SequenceSelection evicted;
  evicted.tenant = h_.tenant();
  evicted.ids = {h_.Open().id};
  std::vector<SequenceId> absent;
  EXPECT_EQ(h_.core().sequences().Evict(evicted, &absent), 1);
  events = log.Read(tenant, 100, &cursor);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, kvcache::EventKind::kPreempted);
  EXPECT_EQ(events[0].sequence, evicted.ids[0]);
  // A release by the client is not a preemption.
  EXPECT_EQ(h_.core().sequences().Release(h_.tenant(), std::vector{h_.Open().id}, &absent), 1);
  EXPECT_TRUE(log.Read(tenant, 100, &cursor).empty());
  const std::vector<kvcache::Miss> misses = log.Misses(tenant, 1);
  ASSERT_EQ(misses.size(), 1u);
  EXPECT_EQ(misses[0].end, kvcache::MatchEnd::kAbsent);
  ASSERT_TRUE(h_.core().models().Unregister(tenant, h_.model().id).ok());
  events = log.Read(tenant, 100, &cursor);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, kvcache::EventKind::kDropped);
}

TEST_F(EnginePrefixTest, APlanForAnotherStateIsRefused) {
  const SequenceInfo first = h_.Open();
  MatchArgs args;
  args.tenant = h_.tenant();
  args.id = first.id;
  args.expected_epoch = 1;
  args.prefix.token_ids = Tokens(4);
  int64_t committed = 0;
  PrefixPlan plan = *h_.core().sequences().PlanMatch(args, &committed);
  ASSERT_TRUE(planner_.Fill(args.tenant, args.prefix, 0, committed, &plan).ok());
  ASSERT_TRUE(Match(first, 0, Tokens(2)).ok());
  EXPECT_EQ(h_.core().sequences().Match(args, plan).status().code(), absl::StatusCode::kAborted);
  OpenArgs open = Args(Tokens(2));
  EXPECT_EQ(h_.core().sequences().Open(open).status().code(), absl::StatusCode::kAborted);
}

// Rows that were declared and not committed may be declared as others, until they are committed.
TEST_F(EnginePrefixTest, RowsThatAreCommittedWhileACallRunsStayWhatTheyWere) {
  const SequenceInfo first = OpenWith(Tokens(5));
  MatchArgs args;
  args.tenant = h_.tenant();
  args.id = first.id;
  args.expected_epoch = 1;
  args.prefix.token_ids = Tokens(5, 100);
  int64_t committed = 0;
  auto plan = h_.core().sequences().PlanMatch(args, &committed);
  ASSERT_TRUE(plan.ok());
  ASSERT_TRUE(planner_.Fill(args.tenant, args.prefix, 0, committed, &*plan).ok());
  Fill(first, 5, 50);
  const auto matched = h_.core().sequences().Match(args, *plan);
  EXPECT_EQ(matched.status().code(), absl::StatusCode::kAborted) << matched.status();
  Release(first);
  EXPECT_EQ(OpenWith(Tokens(5, 100)).length, 0);
  EXPECT_EQ(OpenWith(Tokens(5)).length, 5);
}

TEST_F(EnginePrefixTest, AnExportSaysWhatRowsAreWithoutRoomToDeclareThemTwice) {
  const SequenceInfo source = OpenWith(Tokens(7));
  Fill(source, 7, 50);
  TenantQuota quota;
  quota.bounds[Resource::kPrefixTokens] = Declared();
  ASSERT_TRUE(h_.core().tenants().SetQuota(h_.tenant(), quota, false).ok());
  const auto pages =
      h_.core().transfers().BeginExport({h_.tenant(), source.id, source.epoch, 0, 5});
  ASSERT_TRUE(pages.ok()) << pages.status();
  ASSERT_NE(pages->state.chain, nullptr);
  EXPECT_EQ(pages->state.chain->tokens, Tokens(7));
  EXPECT_EQ(pages->state.declared, 5);
  EXPECT_EQ(Declared(), 7);
}

}  // namespace
}  // namespace mla::scheduler
