// The step rules of the contract, one by one, stepped by hand.
#include "scheduler/engine_core.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using ::testing::HasSubstr;
using testing::MakeRow;
using testing::Row;
using testing::TestRequest;

constexpr double kTolerance = 2e-5;

class EngineCoreTest : public ::testing::Test {
 protected:
  EngineCoreTest() : stream_(h_.core().OpenStream(h_.tenant())) {}

  static std::vector<Row> Rows(int count, uint64_t key) {
    std::vector<Row> rows;
    for (int i = 0; i < count; ++i) rows.push_back(MakeRow(key * 1000 + i, 12));
    return rows;
  }
  static std::vector<const Row*> Pointers(const std::vector<Row>& a,
                                          const std::vector<Row>& b = {}) {
    std::vector<const Row*> all;
    for (const Row& row : a) all.push_back(&row);
    for (const Row& row : b) all.push_back(&row);
    return all;
  }
  // Commits `rows` rows to a sequence on both layers; layer l stores Rows(rows, key + l).
  void Fill(const SequenceInfo& seq, int rows, uint64_t key) {
    const SequenceInfo now = h_.Get(seq.id);
    auto begin = h_.Begin(stream_, 900, {{seq.id, now.epoch, now.length, rows}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    auto a = h_.AppendOnly(stream_, 900, 0, 0, Rows(rows, key));
    auto b = h_.AppendOnly(stream_, 900, 1, 0, Rows(rows, key + 1));
    h_.Run();
    auto end = h_.End(stream_, 900);
    ASSERT_TRUE(end->status.ok()) << end->status;
  }
  void ExpectCode(const TestRequest& request, absl::StatusCode code, const std::string& reason) {
    ASSERT_EQ(request.answers, 1);
    EXPECT_EQ(request.status.code(), code) << request.status;
    EXPECT_EQ(request.fault.reason, reason) << request.status;
  }

  EngineHarness h_;
  StreamId stream_;
};

TEST_F(EngineCoreTest, AStepComputesAndCommits) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 7, 10);
  auto begin = h_.Begin(stream_, 1, {{seq.id, 1, 7, 2}});
  ASSERT_TRUE(begin->status.ok()) << begin->status;
  EXPECT_EQ(begin->total_rows, 2);
  EXPECT_EQ(begin->joined, 1);
  for (int layer = 0; layer < 2; ++layer) {
    auto attend = h_.Attend(stream_, 1, layer, 0, Rows(2, 20 + layer), 5);
    h_.Run();
    ASSERT_TRUE(attend->status.ok()) << attend->status;
    const std::vector<Row> old_rows = Rows(7, 10 + layer);
    const std::vector<Row> new_rows = Rows(2, 20 + layer);
    EXPECT_LT(h_.Error(*attend, Pointers(old_rows, new_rows), {8, 9}, 5), kTolerance);
  }
  auto end = h_.End(stream_, 1);
  ASSERT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(end->lengths, std::vector<int64_t>{9});
  EXPECT_EQ(h_.Get(seq.id).length, 9);
  EXPECT_EQ(h_.Get(seq.id).epoch, 1u);
  EXPECT_EQ(h_.core().cache().CheckInvariants(), "");
}

TEST_F(EngineCoreTest, BeginRefusesWhatDoesNotFitTheSequence) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 4, 1);
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 2, 4, 1}}), absl::StatusCode::kFailedPrecondition,
             "epoch_mismatch");
  auto position = h_.Begin(stream_, 1, {{seq.id, 1, 3, 1}});
  ExpectCode(*position, absl::StatusCode::kFailedPrecondition, "position_mismatch");
  EXPECT_EQ(position->fault.field, "begin_step.sequences[0].start_position");
  EXPECT_EQ(position->fault.last_good_position, 4);
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id + 1, 1, 4, 1}}), absl::StatusCode::kNotFound,
             "sequence_not_found");
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 1, 4, 0}}), absl::StatusCode::kInvalidArgument,
             "out_of_range");
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 1, 4, 25}}), absl::StatusCode::kInvalidArgument,
             "out_of_range");
  ExpectCode(*h_.Begin(stream_, 1, {}), absl::StatusCode::kInvalidArgument, "out_of_range");
  // Named twice: the second mention meets the step that the first one opened.
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 1, 4, 1}, {seq.id, 1, 4, 1}}),
             absl::StatusCode::kFailedPrecondition, "in_step");
  EXPECT_FALSE(h_.Get(seq.id).in_step);
  EXPECT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 4, 1}})->status.ok());
  ExpectCode(*h_.Begin(stream_, 2, {{seq.id, 1, 4, 1}}), absl::StatusCode::kFailedPrecondition,
             "in_step");
}

TEST_F(EngineCoreTest, AnotherTenantSeesNothing) {
  const SequenceInfo seq = h_.Open();
  const StreamId foreign = h_.core().OpenStream("tenant-b");
  ExpectCode(*h_.Begin(foreign, 1, {{seq.id, 1, 0, 1}}), absl::StatusCode::kNotFound,
             "model_not_found");
  Fault fault;
  const TenantKey key = *h_.core().Tenant("tenant-b", &fault);
  ASSERT_TRUE(h_.core().models().Register(key, h_.model(), &fault).ok());
  auto foreign_begin = h_.Begin(foreign, 1, {{seq.id, 1, 0, 1}});
  auto absent_begin = h_.Begin(foreign, 1, {{12345, 1, 0, 1}});
  ExpectCode(*foreign_begin, absl::StatusCode::kNotFound, "sequence_not_found");
  EXPECT_EQ(foreign_begin->status.code(), absent_begin->status.code());
  EXPECT_EQ(h_.core().GetSequences({"tenant-b", {}, ""}).sequences.size(), 0u);
  // The same step id in two tenants is two steps.
  EXPECT_TRUE(h_.Begin(stream_, 7, {{seq.id, 1, 0, 1}})->status.ok());
  ExpectCode(*h_.Query(foreign, 7, 0, 0, 1, 0, 2, 1), absl::StatusCode::kNotFound,
             "step_not_found");
}

TEST_F(EngineCoreTest, AFullPoolRefusesTheStepAsAWhole) {
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
  options.limits.kv_cache_bytes = 1 << 16;  // 256 groups of 256 bytes
  options.limits.max_sequence_rows = 3000;
  options.limits.max_pages_per_sequence = 1000;
  options.limits.max_step_rows = 3000;
  EngineHarness small(std::move(options));
  const StreamId stream = small.core().OpenStream(small.tenant());
  const SequenceInfo a = small.Open();
  const SequenceInfo b = small.Open();
  const int64_t used = small.core().Stats().kv_bytes_used;
  auto begin = small.Begin(stream, 1, {{a.id, 1, 0, 3}, {b.id, 1, 0, 2900}});
  ExpectCode(*begin, absl::StatusCode::kResourceExhausted, "pages_exhausted");
  EXPECT_GT(begin->fault.retry_after_ms, 0);
  EXPECT_EQ(small.core().Stats().kv_bytes_used, used);
  EXPECT_TRUE(small.Begin(stream, 1, {{a.id, 1, 0, 3}})->status.ok());
}

TEST_F(EngineCoreTest, RowsOfALayerComeInOrder) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 4}})->status.ok());
  ExpectCode(*h_.Attend(stream_, 1, 0, 1, Rows(1, 1), 5), absl::StatusCode::kFailedPrecondition,
             "rows_out_of_order");
  auto first = h_.Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  ExpectCode(*h_.Attend(stream_, 1, 0, 1, Rows(2, 1), 5), absl::StatusCode::kFailedPrecondition,
             "rows_out_of_order");
  ExpectCode(*h_.Attend(stream_, 1, 2, 0, Rows(1, 1), 5), absl::StatusCode::kInvalidArgument,
             "out_of_range");
  ExpectCode(*h_.Attend(stream_, 1, 0, 2, Rows(3, 1), 5), absl::StatusCode::kInvalidArgument,
             "out_of_range");
  auto second = h_.Attend(stream_, 1, 0, 2, Rows(2, 2), 5);
  h_.Run();
  EXPECT_TRUE(first->status.ok()) << first->status;
  EXPECT_TRUE(second->status.ok()) << second->status;
  const std::vector<Row> a = Rows(2, 1);
  const std::vector<Row> b = Rows(2, 2);
  EXPECT_LT(h_.Error(*second, Pointers(a, b), {3, 4}, 5), kTolerance);
  auto end = h_.End(stream_, 1);
  ExpectCode(*end, absl::StatusCode::kFailedPrecondition, "rows_missing");
  EXPECT_THAT(end->fault.got, HasSubstr("layer 1: rows 0..3"));
}

TEST_F(EngineCoreTest, ARepeatIsComparedAndRecomputed) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 3}})->status.ok());
  auto original = h_.Attend(stream_, 1, 0, 0, Rows(3, 1), 5);
  auto pipelined = h_.Attend(stream_, 1, 0, 0, Rows(3, 1), 5);  // before the original has run
  h_.Run();
  ASSERT_TRUE(original->status.ok());
  ASSERT_TRUE(pipelined->status.ok()) << pipelined->status;
  EXPECT_EQ(original->output, pipelined->output);
  auto part = h_.Attend(stream_, 1, 0, 1, {Rows(3, 1)[1]}, 6);
  h_.Run();
  ASSERT_TRUE(part->status.ok()) << part->status;
  const std::vector<Row> rows = Rows(3, 1);
  EXPECT_LT(h_.Error(*part, Pointers(rows), {2}, 6), kTolerance);
  auto other = h_.Attend(stream_, 1, 0, 0, Rows(3, 2), 5);
  h_.Run();
  ExpectCode(*other, absl::StatusCode::kAlreadyExists, "kv_rows_differ");
  auto again = h_.Query(stream_, 1, 0, 0, 3, 0, 2, 5);
  h_.Run();
  EXPECT_EQ(again->output, original->output);
}

TEST_F(EngineCoreTest, QueriesWaitForKvRowsAndThenFailByName) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 4}})->status.ok());
  auto early = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  h_.Run();
  EXPECT_FALSE(early->answered());
  auto rows = h_.AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  h_.Run();
  EXPECT_TRUE(rows->status.ok());
  ASSERT_TRUE(early->answered());
  EXPECT_TRUE(early->status.ok()) << early->status;
  auto late = h_.Query(stream_, 1, 0, 2, 2, 0, 2, 5);
  h_.Run();
  h_.Advance(499);
  EXPECT_FALSE(late->answered());
  h_.Advance(2);
  ExpectCode(*late, absl::StatusCode::kFailedPrecondition, "kv_rows_missing");
  EXPECT_THAT(std::string(late->status.message()), HasSubstr("KV rows 2..3 of layer 0"));
}

TEST_F(EngineCoreTest, HeadSlicesShareOneCopyOfTheRows) {
  const SequenceInfo seq = h_.Open();
  const StreamId second = h_.core().OpenStream(h_.tenant());
  const StepSequenceArgs args{seq.id, 1, 0, 2};
  ASSERT_TRUE(h_.Begin(stream_, 1, {args}, 2)->status.ok());
  ExpectCode(*h_.Query(second, 1, 0, 0, 2, 1, 1, 5), absl::StatusCode::kNotFound, "step_not_found");
  auto join = h_.Begin(second, 1, {args}, 2);
  ASSERT_TRUE(join->status.ok()) << join->status;
  EXPECT_EQ(join->joined, 2);
  ExpectCode(*h_.Begin(h_.core().OpenStream(h_.tenant()), 1, {args}, 2),
             absl::StatusCode::kFailedPrecondition, "step_full");
  ExpectCode(*h_.Begin(second, 1, {{seq.id, 1, 0, 1}}, 2), absl::StatusCode::kAlreadyExists,
             "step_exists");
  auto slice = h_.Query(second, 1, 0, 0, 2, 1, 1, 5);
  auto writer = h_.Attend(stream_, 1, 0, 0, Rows(2, 1), 5);
  h_.Run();
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
  h_.core().owned().fetch_add(1);
  h_.core().Accept(&other);
  ExpectCode(other, absl::StatusCode::kFailedPrecondition, "kv_writer_taken");
}

TEST_F(EngineCoreTest, ALostParticipantAbortsTheStep) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 2, 3);
  const StreamId second = h_.core().OpenStream(h_.tenant());
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 2, 2}}, 2)->status.ok());
  ASSERT_TRUE(h_.Begin(second, 1, {{seq.id, 1, 2, 2}}, 2)->status.ok());
  auto waiting = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  h_.core().CloseStream(second);
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
  const StreamId first = h_.core().OpenStream(h_.tenant());
  ASSERT_TRUE(h_.Begin(first, 1, {{seq.id, 1, 0, 2}})->status.ok());
  auto rows = h_.AppendOnly(first, 1, 0, 0, Rows(2, 1));
  h_.Run();
  ASSERT_TRUE(rows->status.ok());
  h_.core().CloseStream(first);
  ASSERT_TRUE(h_.Begin(stream_, 2, {{seq.id, 1, 0, 2}})->status.ok());
  auto fresh = h_.Attend(stream_, 2, 0, 0, Rows(2, 9), 5);
  h_.Run();
  ASSERT_TRUE(fresh->status.ok()) << fresh->status;
  const std::vector<Row> want = Rows(2, 9);
  EXPECT_LT(h_.Error(*fresh, Pointers(want), {1, 2}, 5), kTolerance);
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
  EXPECT_EQ(h_.core().RenewLeases({h_.tenant(), {quick.id}, ""}, 0, &absent), 1);
  h_.Advance(900);
  EXPECT_EQ(h_.core().GetSequences({h_.tenant(), {}, ""}).sequences.size(), 2u);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{slow.id, 1, 0, 1}})->status.ok());
  h_.Advance(200);
  EXPECT_EQ(h_.core().GetSequences({h_.tenant(), {quick.id}, ""}).not_found.size(), 1u);
  EXPECT_EQ(h_.core().Stats().leases_expired, 1u);
  h_.Advance(1900);  // the step expires, the sequence was alive through it
  EXPECT_FALSE(h_.Get(slow.id).in_step);
  h_.Advance(3000);
  EXPECT_EQ(h_.core().Stats().sequences, 0);
  EXPECT_EQ(h_.core().Stats().page_groups_used, 0);
}

TEST_F(EngineCoreTest, DeadlinesAreHonouredBeforeTheLaunch) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 4}})->status.ok());
  auto request = std::make_unique<TestRequest>();
  request->stream = stream_;
  request->step_id = 1;
  request->attend.row_count = 2;
  request->attend.profile = Profile::kAppendOnly;
  request->attend.has_kv = true;
  request->attend.timeout_us = 1500;
  const std::vector<Row> rows = Rows(2, 1);
  request->kv_rows.assign(24, 0);
  request->attend.kv = reinterpret_cast<const std::byte*>(request->kv_rows.data());
  request->engine.arrival_ns = h_.clock().Now();
  h_.core().owned().fetch_add(1);
  h_.core().Accept(request.get());
  auto after = h_.AppendOnly(stream_, 1, 0, 2, Rows(2, 2));
  h_.clock().Advance(2'000'000);
  h_.Run();
  EXPECT_EQ(request->status.code(), absl::StatusCode::kDeadlineExceeded);
  // The rows after the lost ones cannot be stored; both may be sent again.
  ExpectCode(*after, absl::StatusCode::kFailedPrecondition, "rows_out_of_order");
  auto again = h_.AppendOnly(stream_, 1, 0, 0, Rows(4, 1));
  h_.Run();
  EXPECT_TRUE(again->status.ok()) << again->status;
}

TEST_F(EngineCoreTest, ADraftIsVerifiedAndPartlyKept) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 3, 1);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 3, 4}})->status.ok());
  auto rows0 = h_.AppendOnly(stream_, 1, 0, 0, Rows(4, 50));
  auto rows1 = h_.AppendOnly(stream_, 1, 1, 0, Rows(4, 51));
  h_.Run();
  ExpectCode(*h_.End(stream_, 1, {5}), absl::StatusCode::kInvalidArgument, "out_of_range");
  ExpectCode(*h_.End(stream_, 1, {1, 1}), absl::StatusCode::kInvalidArgument, "out_of_range");
  auto end = h_.End(stream_, 1, {2});
  ASSERT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(end->lengths, std::vector<int64_t>{5});
  EXPECT_EQ(h_.Get(seq.id).epoch, 1u);
  ASSERT_TRUE(h_.Begin(stream_, 2, {{seq.id, 1, 5, 1}})->status.ok());
  auto attend = h_.Attend(stream_, 2, 0, 0, Rows(1, 70), 5);
  h_.Run();
  std::vector<Row> kept = Rows(4, 50);
  kept.resize(2);
  kept.push_back(Rows(1, 70)[0]);
  const std::vector<Row> old_rows = Rows(3, 1);
  EXPECT_LT(h_.Error(*attend, Pointers(old_rows, kept), {6}, 5), kTolerance);
}

TEST_F(EngineCoreTest, FewerLayersThanRegisteredCommitWhenNoRowIsKept) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 4}})->status.ok());
  auto end = h_.End(stream_, 1, {0});
  ASSERT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(end->lengths, std::vector<int64_t>{0});
}

TEST_F(EngineCoreTest, EndStepWaitsForTheRequestsBeforeIt) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}})->status.ok());
  auto a = h_.AppendOnly(stream_, 1, 0, 0, Rows(1, 1));
  auto b = h_.AppendOnly(stream_, 1, 1, 0, Rows(1, 2));
  auto end = h_.End(stream_, 1);
  EXPECT_FALSE(end->answered());
  ExpectCode(*h_.End(stream_, 1), absl::StatusCode::kFailedPrecondition, "step_ending");
  h_.Run();
  EXPECT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(end->answers, 1);
}

TEST_F(EngineCoreTest, ForksShareRowsAndPartWays) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 4, 1);
  Fault fault;
  ForkArgs args;
  args.tenant = h_.tenant();
  args.parent = seq.id;
  args.expected_epoch = 1;
  args.request_id = "fork-1";
  auto child = h_.core().ForkSequence(args, &fault);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(h_.core().ForkSequence(args, &fault)->id, child->id);
  args.length = 2;
  EXPECT_EQ(h_.core().ForkSequence(args, &fault).status().code(), absl::StatusCode::kAlreadyExists);
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

TEST_F(EngineCoreTest, TruncateFencesTheDroppedBranch) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 5, 1);
  Fault fault;
  auto cut = h_.core().TruncateSequence(h_.tenant(), seq.id, 2, 1, &fault);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->epoch, 2u);
  EXPECT_EQ(h_.core().TruncateSequence(h_.tenant(), seq.id, 2, 1, &fault)->epoch, 2u);
  EXPECT_EQ(h_.core().TruncateSequence(h_.tenant(), seq.id, 1, 1, &fault).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(h_.core().TruncateSequence(h_.tenant(), seq.id, 3, 2, &fault).status().code(),
            absl::StatusCode::kInvalidArgument);
  ExpectCode(*h_.Begin(stream_, 1, {{seq.id, 1, 2, 1}}), absl::StatusCode::kFailedPrecondition,
             "epoch_mismatch");
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 2, 2, 1}})->status.ok());
  EXPECT_EQ(h_.core().TruncateSequence(h_.tenant(), seq.id, 1, 2, &fault).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(EngineCoreTest, ReleaseAbortsTheStepThatHoldsTheSequence) {
  const SequenceInfo seq = h_.Open("open-1");
  EXPECT_EQ(h_.Open("open-1").id, seq.id);
  const SequenceInfo other = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}, {other.id, 1, 0, 1}})->status.ok());
  auto waiting = h_.AppendOnly(stream_, 1, 0, 0, Rows(2, 1));
  std::vector<SequenceId> absent;
  EXPECT_EQ(h_.core().ReleaseSequences(h_.tenant(), std::vector<SequenceId>{seq.id, 77}, &absent),
            1);
  EXPECT_EQ(absent, std::vector<SequenceId>{77});
  ExpectCode(*waiting, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_FALSE(h_.Get(other.id).in_step);
  EXPECT_NE(h_.Open("open-1").id, seq.id);
}

TEST_F(EngineCoreTest, LongPrefillIsCutAndDecodeGoesFirst) {
  const SequenceInfo prompt = h_.Open();
  const SequenceInfo chat = h_.Open();
  Fill(chat, 3, 1);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{prompt.id, 1, 0, 14}})->status.ok());
  ASSERT_TRUE(h_.Begin(stream_, 2, {{chat.id, 1, 3, 1}})->status.ok());
  auto prefill = h_.Attend(stream_, 1, 0, 0, Rows(14, 40), 5);
  auto decode = h_.Attend(stream_, 2, 1, 0, Rows(1, 60), 6);
  ASSERT_TRUE(h_.core().StartLaunch());
  ASSERT_TRUE(h_.core().CompleteLaunch(true));
  EXPECT_TRUE(decode->answered());  // in the first launch, beside the first piece of the prefill
  EXPECT_FALSE(prefill->answered());
  EXPECT_EQ(decode->timings.launch_requests, 2);
  EXPECT_EQ(decode->timings.launch_layers, 2);
  h_.Run();
  ASSERT_TRUE(prefill->status.ok()) << prefill->status;
  const std::vector<Row> rows = Rows(14, 40);
  std::vector<int> visible;
  for (int i = 1; i <= 14; ++i) visible.push_back(i);
  EXPECT_LT(h_.Error(*prefill, Pointers(rows), visible, 5), kTolerance);
  const EngineStats stats = h_.core().Stats();
  // 14 of the prompt, 1 of the chat, and the 3 rows x 2 layers that filled the chat before.
  EXPECT_EQ(stats.rows_decode + stats.rows_extend + stats.rows_prefill, 21u);
  EXPECT_EQ(stats.rows_decode, 2u);  // the chat's, and the last of the 6, cut off by the row budget
}

TEST_F(EngineCoreTest, OnePlanServesTheLayersOfAStep) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 3, 1);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 3, 1}})->status.ok());
  auto first = h_.Attend(stream_, 1, 0, 0, Rows(1, 1), 5);
  h_.Run();
  auto second = h_.Attend(stream_, 1, 1, 0, Rows(1, 1), 5);
  h_.Run();
  EXPECT_FALSE(first->timings.plan_reused);
  EXPECT_TRUE(second->timings.plan_reused);
}

TEST_F(EngineCoreTest, DrainRefusesNewWorkAndKeepsOpenSteps) {
  const SequenceInfo seq = h_.Open();
  const SequenceInfo other = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}})->status.ok());
  h_.core().StartDrain();
  ExpectCode(*h_.Begin(stream_, 2, {{other.id, 1, 0, 1}}), absl::StatusCode::kUnavailable,
             "draining");
  auto a = h_.AppendOnly(stream_, 1, 0, 0, Rows(1, 1));
  auto b = h_.AppendOnly(stream_, 1, 1, 0, Rows(1, 1));
  auto end = h_.End(stream_, 1);
  h_.Run();
  EXPECT_TRUE(end->status.ok()) << end->status;
  EXPECT_EQ(h_.core().AbortAllSteps("drained"), 0);
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
