// Tests who may take part in a step, and how steps and sequences begin, share rows and end.
#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineCoreTest;
using ::testing::HasSubstr;
using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

TEST_F(EngineCoreTest, AnotherTenantSeesNothing) {
  const SequenceInfo seq = h_.Open();
  const StreamId foreign = h_.core().steps().OpenStream("tenant-b");
  ExpectCode(*h_.Begin(foreign, 1, {{seq.id, 1, 0, 1}}), absl::StatusCode::kNotFound,
             "model_not_found");
  const TenantRef other = *h_.core().tenants().Enter("tenant-b");
  ASSERT_TRUE(h_.core().models().Register(other->key(), h_.model()).ok());
  auto foreign_begin = h_.Begin(foreign, 1, {{seq.id, 1, 0, 1}});
  auto absent_begin = h_.Begin(foreign, 1, {{12345, 1, 0, 1}});
  ExpectCode(*foreign_begin, absl::StatusCode::kNotFound, "sequence_not_found");
  EXPECT_EQ(foreign_begin->status.code(), absent_begin->status.code());
  EXPECT_EQ(h_.core().sequences().Get({"tenant-b", {}, ""}).sequences.size(), 0u);
  // A step id used by two tenants names two steps.
  EXPECT_TRUE(h_.Begin(stream_, 7, {{seq.id, 1, 0, 1}})->status.ok());
  ExpectCode(*h_.Query(foreign, 7, 0, 0, 1, 0, 2, 1), absl::StatusCode::kNotFound,
             "step_not_found");
}

TEST_F(EngineCoreTest, HeadSlicesShareOneCopyOfTheRows) {
  const SequenceInfo seq = h_.Open();
  const StreamId second = h_.core().steps().OpenStream(h_.tenant());
  const StepSequenceArgs args{seq.id, 1, 0, 2};
  ASSERT_TRUE(h_.Begin(stream_, 1, {args}, 2)->status.ok());
  ExpectCode(*h_.Query(second, 1, 0, 0, 2, 1, 1, 5), absl::StatusCode::kNotFound, "step_not_found");
  auto join = h_.Begin(second, 1, {args}, 2);
  ASSERT_TRUE(join->status.ok()) << join->status;
  EXPECT_EQ(join->joined, 2);
  ExpectCode(*h_.Begin(h_.core().steps().OpenStream(h_.tenant()), 1, {args}, 2),
             absl::StatusCode::kFailedPrecondition, "step_full");
  ExpectCode(*h_.Begin(second, 1, {{seq.id, 1, 0, 1}}, 2), absl::StatusCode::kAlreadyExists,
             "step_exists");
  auto slice = h_.Query(second, 1, 0, 0, 2, 1, 1, 5);
  auto writer = h_.Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  h_.AdvanceMicros(testing::TinyLimits().slice_wait_us);  // for a slice of the other heads
  h_.Run();
  ASSERT_TRUE(slice->answered());
  ASSERT_TRUE(slice->status.ok()) << slice->status;
  const std::vector<Row> rows = Rows(2, 1);
  EXPECT_LT(h_.Error(*slice, Pointers(rows), {1, 2}, 5), kTolerance);
  ExpectCode(*h_.End(second, 1), absl::StatusCode::kFailedPrecondition, "not_the_leader");
  ExpectCode(*h_.Abort(second, 1), absl::StatusCode::kFailedPrecondition, "not_the_leader");
}

TEST_F(EngineCoreTest, OnlyOneSliceBringsTheRows) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 2}})->status.ok());
  auto rows = h_.AppendOnly(stream_, 1, 0, 0, Rows(1, 1));
  ASSERT_FALSE(rows->answered());
  TestRequest other;
  other.stream = stream_;
  other.step_id = 1;
  other.attend.row_begin = 1;
  other.attend.row_count = 1;
  other.attend.head_offset = 1;
  other.attend.profile = Profile::kAppendOnly;
  other.attend.has_kv = true;
  h_.Submit(&other);
  ExpectCode(other, absl::StatusCode::kFailedPrecondition, "kv_writer_taken");
}

TEST_F(EngineCoreTest, ALostParticipantAbortsTheStep) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 2, 3);
  const StreamId second = h_.core().steps().OpenStream(h_.tenant());
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 2, 2}}, 2)->status.ok());
  ASSERT_TRUE(h_.Begin(second, 1, {{seq.id, 1, 2, 2}}, 2)->status.ok());
  auto waiting = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  h_.core().steps().CloseStream(second);
  ASSERT_TRUE(waiting->answered());
  EXPECT_EQ(waiting->status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(waiting->step_aborted);
  EXPECT_EQ(h_.Get(seq.id).length, 2);
  EXPECT_FALSE(h_.Get(seq.id).in_step);
  auto gone = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  ExpectCode(*gone, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_THAT(std::string(gone->status.message()), HasSubstr("participant"));
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

TEST_F(EngineCoreTest, AStepDiesWithItsStreamAndMayBeBegunAnew) {
  const SequenceInfo seq = h_.Open();
  const StreamId first = h_.core().steps().OpenStream(h_.tenant());
  ASSERT_TRUE(h_.Begin(first, 1, {{seq.id, 1, 0, 2}})->status.ok());
  auto rows = h_.AppendOnly(first, 1, 0, 0, Rows(2, 1));
  h_.Run();
  ASSERT_TRUE(rows->status.ok());
  h_.core().steps().CloseStream(first);
  ASSERT_TRUE(h_.Begin(stream_, 2, {{seq.id, 1, 0, 2}})->status.ok());
  auto fresh = h_.Attend(stream_, 2, 0, 0, Rows(2, 9), 5);
  h_.Run();
  ASSERT_TRUE(fresh->status.ok()) << fresh->status;
  const std::vector<Row> want = Rows(2, 9);
  EXPECT_LT(h_.Error(*fresh, Pointers(want), {1, 2}, 5), kTolerance);
}

TEST_F(EngineCoreTest, WhatAbortedAStepIsForgottenWhenItsIdIsUsedAgain) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 7, {{seq.id, 1, 0, 1}})->status.ok());
  ASSERT_TRUE(h_.Abort(stream_, 7)->status.ok());
  ExpectCode(*h_.Query(stream_, 7, 0, 0, 1, 0, 2, 5), absl::StatusCode::kAborted, "step_aborted");
  ASSERT_TRUE(h_.Begin(stream_, 7, {{seq.id, 1, 0, 1}})->status.ok());
  for (int layer = 0; layer < h_.model().layers; ++layer) {
    auto rows = h_.AppendOnly(stream_, 7, layer, 0, Rows(1, 1));
    h_.Run();
    ASSERT_TRUE(rows->status.ok()) << rows->status;
  }
  ASSERT_TRUE(h_.End(stream_, 7)->status.ok());
  // The step of this id has been committed, so nothing of it was lost.
  auto late = h_.Query(stream_, 7, 0, 0, 1, 0, 2, 5);
  ExpectCode(*late, absl::StatusCode::kNotFound, "step_not_found");
  EXPECT_FALSE(late->step_aborted);
}

TEST_F(EngineCoreTest, ASilentStepExpiresAndABusyOneDoesNot) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 2}})->status.ok());
  h_.Advance(1999);
  auto rows = h_.AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  h_.Advance(1999);  // waits for a launch: alive
  h_.Run();
  EXPECT_TRUE(rows->status.ok()) << rows->status;
  h_.Advance(1999);
  EXPECT_TRUE(h_.Get(seq.id).in_step);
  h_.Advance(2);
  EXPECT_FALSE(h_.Get(seq.id).in_step);
  auto late = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  ExpectCode(*late, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_TRUE(late->step_aborted);
  EXPECT_EQ(h_.core().Stats().steps_aborted, 1u);
}

TEST_F(EngineCoreTest, SequenceLeasesExpireAndAreRenewed) {
  const SequenceInfo quick = h_.Open("", 1000);
  const SequenceInfo slow = h_.Open("", 3000);
  h_.Advance(900);
  std::vector<SequenceId> absent;
  EXPECT_EQ(h_.core().sequences().Renew({h_.tenant(), {quick.id}, ""}, 0, &absent), 1);
  h_.Advance(900);
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {}, ""}).sequences.size(), 2u);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{slow.id, 1, 0, 1}})->status.ok());
  h_.Advance(200);
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {quick.id}, ""}).not_found.size(), 1u);
  EXPECT_EQ(h_.core().Stats().leases_expired, 1u);
  h_.Advance(1900);  // the step expires, the sequence was alive through it
  EXPECT_FALSE(h_.Get(slow.id).in_step);
  h_.Advance(3000);
  EXPECT_EQ(h_.core().Stats().sequences, 0);
  EXPECT_EQ(h_.core().Stats().page_groups_used, 0);
}

TEST_F(EngineCoreTest, ALateBeginStepDoesNotReviveAnExpiredSequence) {
  const auto seq = h_.Open("", 1000);
  Fill(seq, 2, 1);
  h_.clock().Advance(int64_t{1'000'000'000});  // and no timer has run yet
  const auto begin = h_.Begin(stream_, 1, {{seq.id, 1, 2, 1}});
  ExpectCode(*begin, absl::StatusCode::kNotFound, "sequence_not_found");
  EXPECT_EQ(h_.core().Stats().leases_expired, 1u);
}

// Names may hold any character: the texts "a/b" and "c" join to what "a" and "b/c" join to.
TEST_F(EngineCoreTest, AnOpenIsNoRepeatOfOneWhoseNamesJoinToTheSameText) {
  const TenantKey tenant = (*h_.core().tenants().Enter(h_.tenant()))->key();
  ASSERT_TRUE(h_.core().models().Unregister(tenant, h_.model().id).ok());  // makes room
  for (const char* const id : {"a", "a/b"}) {
    ModelSpec model = h_.model();
    model.id = id;
    const auto registered = h_.core().models().Register(tenant, model);
    ASSERT_TRUE(registered.ok()) << registered.status();
  }
  OpenArgs first;
  first.tenant = h_.tenant();
  first.model_id = "a/b";
  first.request_id = "r";
  first.client_id = "c";
  const auto opened = h_.core().sequences().Open(first);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(h_.core().sequences().Open(first)->id, opened->id);
  OpenArgs second = first;
  second.model_id = "a";
  second.client_id = "b/c";
  EXPECT_EQ(DetailOf(h_.core().sequences().Open(second).status()).reason, "request_id_reused");
}

// Messages that clients sent during the pause have yet to be read.
TEST_F(EngineCoreTest, APauseOfTheProcessCountsAgainstNothingThatClientsMustSendInTime) {
  constexpr int64_t kPauseMs = 13'000;
  const SequenceInfo idle = h_.Open("", 1000), used = h_.Open("", 1000);
  ModelSpec leased = h_.model();
  leased.id = "leased";
  const TenantKey tenant = (*h_.core().tenants().Enter(h_.tenant()))->key();
  ASSERT_TRUE(h_.core().models().Register(tenant, leased, 1000).ok());
  ASSERT_TRUE(h_.Begin(stream_, 1, {{used.id, 1, 0, 2}})->status.ok());
  const auto query = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);  // its KV rows have not come
  h_.clock().Advance(kPauseMs * 1'000'000);
  h_.core().steps().NotePause(kPauseMs * 1'000'000);
  h_.core().steps().Tick();
  EXPECT_FALSE(query->answered()) << query->status;
  std::vector<SequenceId> absent;
  EXPECT_EQ(h_.core().sequences().Renew({h_.tenant(), {idle.id, used.id}, ""}, 0, &absent), 2);
  EXPECT_TRUE(h_.Get(used.id).in_step);
  EXPECT_EQ(h_.core().models().size(), 2);
  EXPECT_EQ(h_.core().Stats().leases_expired, 0u);
  EXPECT_EQ(h_.core().Stats().pauses, 1u);
  // Later time counts.
  h_.Advance(1000);
  EXPECT_EQ(h_.core().sequences().Get({h_.tenant(), {idle.id}, ""}).not_found.size(), 1u);
  EXPECT_EQ(h_.core().models().size(), 1);
  ExpectCode(*query, absl::StatusCode::kFailedPrecondition, "kv_rows_missing");
}

TEST_F(EngineCoreTest, ForksShareRowsAndPartWays) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 4, 1);
  ForkArgs args;
  args.tenant = h_.tenant();
  args.parent = seq.id;
  args.expected_epoch = 1;
  args.request_id = "fork-1";
  auto child = h_.core().sequences().Fork(args);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(h_.core().sequences().Fork(args)->id, child->id);
  args.length = 2;
  EXPECT_EQ(h_.core().sequences().Fork(args).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 4, 1}, {child->id, 1, 4, 1}})->status.ok());
  const std::vector<Row> both = Rows(2, 30);
  auto attend = h_.Attend(stream_, 1, 0, 0, both, 5);
  h_.Run();
  ASSERT_TRUE(attend->status.ok()) << attend->status;
  const std::vector<Row> shared = Rows(4, 1);
  // Row 0 belongs to the parent, row 1 to the child: each sees its own fifth row.
  TestRequest parent_part;
  parent_part.attend = attend->attend;
  parent_part.attend.row_count = 1;
  parent_part.output = attend->output;
  parent_part.lse = attend->lse;
  EXPECT_LT(h_.Error(parent_part, Pointers(shared, {both[0]}), {5}, 5), kTolerance);
  TestRequest child_part;
  child_part.attend = attend->attend;
  child_part.attend.row_begin = 1;
  child_part.attend.row_count = 1;
  child_part.output.assign(attend->output.begin() + 16, attend->output.end());
  child_part.lse.assign(attend->lse.begin() + 2, attend->lse.end());
  std::vector<const Row*> child_rows = Pointers(shared);
  child_rows.push_back(&both[1]);
  EXPECT_LT(h_.Error(child_part, child_rows, {5}, 5), kTolerance);
  EXPECT_EQ(h_.core().Stats().copies_on_write, 1u);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

// A fork's last page is copied layer by layer, each with its first row.
TEST_F(EngineCoreTest, AForkCopiesWhatItWrites) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 2, 1);
  const uint64_t layer = 2 * 24;                                      // bytes of two rows
  const std::vector<Row> shared = Rows(2, 1 + 1), own = Rows(1, 30);  // rows of the second layer
  ForkArgs args;
  args.tenant = h_.tenant();
  args.parent = seq.id;
  args.expected_epoch = 1;
  const auto child = h_.core().sequences().Fork(args);
  ASSERT_TRUE(child.ok()) << child.status();
  const auto copied = [&] { return h_.core().Stats().kv_bytes_copied; };
  ASSERT_TRUE(h_.Begin(stream_, 1, {{child->id, 1, 2, 2}})->status.ok());
  EXPECT_EQ(h_.core().Stats().page_groups_used, 3);
  h_.Run();
  EXPECT_EQ(copied(), 0u);
  auto second = h_.Attend(stream_, 1, 1, 0, own, 5);
  h_.Run();
  ASSERT_TRUE(second->status.ok()) << second->status;
  EXPECT_LT(h_.Error(*second, Pointers(shared, own), {3}, 5), kTolerance);
  EXPECT_EQ(copied(), layer);
  const auto more = h_.AppendOnly(stream_, 1, 1, 1, own);
  h_.Run();
  ASSERT_TRUE(more->status.ok()) << more->status;
  EXPECT_EQ(copied(), layer) << "the layer has been copied";
  ASSERT_TRUE(h_.Abort(stream_, 1)->status.ok());
  EXPECT_EQ(h_.core().Stats().page_groups_used, 1) << "it shares its page again";

  ASSERT_TRUE(h_.Begin(stream_, 2, {{child->id, 1, 2, 1}, {seq.id, 1, 2, 1}})->status.ok());
  const auto first = h_.AppendOnly(stream_, 2, 0, 0, Rows(2, 40));
  auto last = h_.Attend(stream_, 2, 1, 0, Rows(2, 40), 5);
  h_.Run();
  ASSERT_TRUE(last->status.ok()) << last->status;
  EXPECT_EQ(copied(), 3 * layer) << "of the child alone";
  ASSERT_TRUE(h_.End(stream_, 2)->status.ok());
  EXPECT_EQ(h_.core().Stats().copies_on_write, 2u);
  EXPECT_EQ(h_.core().Stats().page_groups_used, 2);
  EXPECT_EQ(h_.core().cache().work().copies_open(), 0);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

TEST_F(EngineCoreTest, ForksOfWhatTheClientDoesNotKnowAreRefused) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 4, 1);
  ForkArgs args;
  args.tenant = h_.tenant();
  args.parent = seq.id;
  args.expected_epoch = 2;  // it is at 1
  EXPECT_EQ(h_.core().sequences().Fork(args).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(args).status()).reason, "epoch_mismatch");
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(args).status()).field, "expected_epoch");
  args.expected_epoch = 1;
  args.length = 5;
  EXPECT_EQ(h_.core().sequences().Fork(args).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(args).status()).field, "length");
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(args).status()).limit, "0..4");
  args.length = 4;
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 4, 1}})->status.ok());
  EXPECT_EQ(h_.core().sequences().Fork(args).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(h_.core().sequences().Fork(args).status()).reason, "in_step");
  ASSERT_TRUE(h_.Abort(stream_, 1)->status.ok());
  EXPECT_TRUE(h_.core().sequences().Fork(args).ok());
  EXPECT_EQ(h_.core().Stats().sequences, 2);
}

TEST_F(EngineCoreTest, ARepeatOfTruncateIsOneOnlyWithItsOwnLength) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 5, 1);
  ASSERT_TRUE(h_.core().sequences().Truncate(h_.tenant(), seq.id, 2, 1).ok());
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 2, 2, 1}})->status.ok());
  auto first = h_.AppendOnly(stream_, 1, 0, 0, Rows(1, 9));
  auto second = h_.AppendOnly(stream_, 1, 1, 0, Rows(1, 9));
  h_.Run();
  ASSERT_TRUE(h_.End(stream_, 1)->status.ok());
  ASSERT_EQ(h_.Get(seq.id).length, 3);
  // Late messages of the old epoch: one that names today's length, and the old one again.
  for (const int64_t length : {3, 2}) {
    EXPECT_EQ(h_.core().sequences().Truncate(h_.tenant(), seq.id, length, 1).status().code(),
              absl::StatusCode::kFailedPrecondition)
        << length;
    EXPECT_EQ(
        DetailOf(h_.core().sequences().Truncate(h_.tenant(), seq.id, length, 1).status()).reason,
        "epoch_mismatch");
    EXPECT_EQ(DetailOf(h_.core().sequences().Truncate(h_.tenant(), seq.id, length, 1).status())
                  .last_good_position,
              3);
  }
  EXPECT_EQ(h_.Get(seq.id).length, 3);
  EXPECT_EQ(h_.Get(seq.id).epoch, 2u);
}

TEST_F(EngineCoreTest, TruncateFencesTheDroppedBranch) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 5, 1);
  auto cut = h_.core().sequences().Truncate(h_.tenant(), seq.id, 2, 1);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->epoch, 2u);
  EXPECT_EQ(h_.core().sequences().Truncate(h_.tenant(), seq.id, 2, 1)->epoch, 2u);
  EXPECT_EQ(h_.core().sequences().Truncate(h_.tenant(), seq.id, 1, 1).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(h_.core().sequences().Truncate(h_.tenant(), seq.id, 3, 2).status().code(),
            absl::StatusCode::kInvalidArgument);
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 1, 2, 1}}), absl::StatusCode::kFailedPrecondition,
             "epoch_mismatch");
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 2, 2, 1}})->status.ok());
  EXPECT_EQ(h_.core().sequences().Truncate(h_.tenant(), seq.id, 1, 2).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(EngineCoreTest, DefaultLeasesAreThoseInForceWhenSomethingBegins) {
  const SequenceInfo before = h_.Open();
  EXPECT_EQ(before.lease_ms, h_.core().limits().sequence_lease_ms);
  h_.core().SetDefaultLeases({.sequence_ms = 4321, .model_ms = 5432, .step_ms = 654});
  const SequenceInfo after = h_.Open();
  EXPECT_EQ(after.lease_ms, 4321);
  const auto kept = h_.core().sequences().Get({h_.tenant(), {before.id}, ""}).sequences;
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(kept[0].lease_ms, before.lease_ms);
  ModelSpec another = h_.model();
  another.id = "another";
  const TenantRef tenant = *h_.core().tenants().Enter(h_.tenant());
  const auto registered = h_.core().models().Register(tenant->key(), another);
  ASSERT_TRUE(registered.ok());
  EXPECT_EQ((*registered)->lease_ns, int64_t{5432} * 1'000'000);
}

TEST_F(EngineCoreTest, ReleaseAbortsTheStepThatHoldsTheSequence) {
  const SequenceInfo seq = h_.Open("open-1");
  EXPECT_EQ(h_.Open("open-1").id, seq.id);
  const SequenceInfo other = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}, {other.id, 1, 0, 1}})->status.ok());
  auto waiting = h_.AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  std::vector<SequenceId> absent;
  EXPECT_EQ(
      h_.core().sequences().Release(h_.tenant(), std::vector<SequenceId>{seq.id, 77}, &absent), 1);
  EXPECT_EQ(absent, std::vector<SequenceId>{77});
  ExpectCode(*waiting, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_FALSE(h_.Get(other.id).in_step);
  EXPECT_NE(h_.Open("open-1").id, seq.id);
}

TEST_F(EngineCoreTest, DrainRefusesNewWorkAndKeepsOpenSteps) {
  const SequenceInfo seq = h_.Open();
  const SequenceInfo other = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}})->status.ok());
  h_.core().draining().Start();
  ExpectCode(*h_.Begin(stream_, 2, {{other.id, 1, 0, 1}}), absl::StatusCode::kUnavailable,
             "draining");
  auto a = h_.AppendOnly(stream_, 1, 0, 0, Rows(1, 1));
  auto b = h_.AppendOnly(stream_, 1, 1, 0, Rows(1, 1));
  auto end = h_.End(stream_, 1);
  h_.Run();
  EXPECT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(h_.core().steps().AbortAll("drained"), 0);
}

// Remembers the sequences that were closed.
class ClosedSequences final : public EngineObserver {
 public:
  void OnLaunch(const LaunchReport&) override {}
  void OnRequest(const RequestReport&) override {}
  void OnSequenceClosed(int64_t rows, int64_t open_ns) override {
    closed.emplace_back(rows, open_ns);
  }
  std::vector<std::pair<int64_t, int64_t>> closed;
};

TEST(EngineObserverTest, HearsOfEverySequenceThatGoes) {
  ClosedSequences observer;
  testing::EngineHarness h({testing::TinyLimits(), testing::TinyModel(), nullptr, &observer});
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const SequenceInfo released = h.Open("", 60000);
  h.Open("", 8000);
  ASSERT_TRUE(h.Begin(stream, 1, {{released.id, 1, 0, 2}})->status.ok());
  const std::vector<Row> rows = {testing::MakeRow(1, 12), testing::MakeRow(2, 12)};
  const auto a = h.AppendOnly(stream, 1, 0, 0, rows);
  const auto b = h.AppendOnly(stream, 1, 1, 0, rows);
  h.Run();
  ASSERT_TRUE(h.End(stream, 1)->status.ok());
  h.Advance(3000);
  std::vector<SequenceId> absent;
  h.core().sequences().Release(h.tenant(), std::vector<SequenceId>{released.id}, &absent);
  h.Advance(6000);
  const EngineStats stats = h.core().Stats();
  EXPECT_EQ(stats.leases_expired, 1u);
  EXPECT_EQ(stats.page_groups_taken, 1u);
  EXPECT_EQ(stats.page_groups_released, 1u);
  const std::vector<std::pair<int64_t, int64_t>> want = {{2, 3'000'000'000}, {0, 9'000'000'000}};
  EXPECT_EQ(observer.closed, want);
}

TEST_F(EngineCoreTest, OpenStepsAreBounded) {
  std::vector<SequenceInfo> sequences;
  for (int i = 0; i < 7; ++i) sequences.push_back(h_.Open());
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(h_.Begin(stream_, 1 + i, {{sequences[i].id, 1, 0, 1}})->status.ok());
  }
  ExpectCode(*h_.Begin(stream_, 7, {{sequences[6].id, 1, 0, 1}}),
             absl::StatusCode::kResourceExhausted, "steps_exhausted");
  EXPECT_TRUE(h_.Abort(stream_, 3)->status.ok());
  EXPECT_TRUE(h_.Begin(stream_, 7, {{sequences[6].id, 1, 0, 1}})->status.ok());
}

}  // namespace
}  // namespace mla::scheduler
