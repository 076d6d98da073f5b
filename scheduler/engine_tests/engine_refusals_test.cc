// Tests who may speak for a step, and what must be there before it is committed. One wrong detail
// at a time, so that each refusal is the only thing that can stop the message.
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineCoreTest;
using testing::Pointers;
using testing::Row;
using testing::Rows;

class EngineRefusalsTest : public EngineCoreTest {
 protected:
  // A stream of a tenant that has a model of the same name.
  StreamId ForeignStream() {
    const TenantRef other = *h_.core().tenants().Enter("tenant-b");
    EXPECT_TRUE(h_.core().models().Register(other->key(), h_.model()).ok());
    OpenArgs open;
    open.tenant = "tenant-b";
    open.model_id = h_.model().id;
    const auto seq = h_.core().sequences().Open(open);
    EXPECT_TRUE(seq.ok()) << seq.status();
    const StreamId stream = h_.core().steps().OpenStream("tenant-b");
    EXPECT_TRUE(h_.Begin(stream, 500, {{seq->id, 1, 0, 1}})->status.ok());
    return stream;
  }
};

TEST_F(EngineRefusalsTest, JoiningMeansRepeatingTheSameBegin) {
  const SequenceInfo a = h_.Open();
  const SequenceInfo b = h_.Open();
  Fill(a, 2, 1);
  const std::vector<StepSequenceArgs> begun = {{a.id, 1, 2, 2}, {b.id, 1, 0, 1}};
  ASSERT_TRUE(h_.Begin(stream_, 1, begun, 3)->status.ok());
  const StreamId rank = h_.core().steps().OpenStream(h_.tenant());
  const std::vector<std::vector<StepSequenceArgs>> kOthers = {
      {{a.id, 2, 2, 2}, {b.id, 1, 0, 1}},
      {{a.id, 1, 1, 2}, {b.id, 1, 0, 1}},
      {{a.id, 1, 2, 1}, {b.id, 1, 0, 1}},
      {{b.id, 1, 0, 1}, {a.id, 1, 2, 2}},
      {{a.id, 1, 2, 2}},
      {{a.id, 1, 2, 2}, {b.id, 1, 0, 2}},
  };
  for (size_t i = 0; i < kOthers.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectCode(*h_.Begin(rank, 1, kOthers[i], 3), absl::StatusCode::kAlreadyExists, "step_exists");
  }
  ExpectCode(*h_.Begin(rank, 1, begun, 2), absl::StatusCode::kAlreadyExists, "step_exists");
  const auto joined = h_.Begin(rank, 1, begun, 3);
  ASSERT_TRUE(joined->status.ok()) << joined->status;
  EXPECT_EQ(joined->joined, 2);
}

TEST_F(EngineRefusalsTest, AStreamThatDidNotJoinHasNoSay) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}}, 2)->status.ok());
  const StreamId stranger = h_.core().steps().OpenStream(h_.tenant());
  // It has a step of its own, so it is a stream like any other.
  const SequenceInfo own = h_.Open();
  ASSERT_TRUE(h_.Begin(stranger, 2, {{own.id, 1, 0, 1}})->status.ok());
  ExpectCode(*h_.AppendOnly(stranger, 1, 0, 0, Rows(1, 1)), absl::StatusCode::kNotFound,
             "step_not_found");
  ExpectCode(*h_.Query(stranger, 1, 0, 0, 1, 0, 2, 5), absl::StatusCode::kNotFound,
             "step_not_found");
  ExpectCode(*h_.End(stranger, 1), absl::StatusCode::kNotFound, "step_not_found");
  ExpectCode(*h_.Abort(stranger, 1), absl::StatusCode::kNotFound, "step_not_found");
  EXPECT_TRUE(h_.Get(seq.id).in_step);
}

TEST_F(EngineRefusalsTest, WhyAStepWasAbortedIsToldToItsTenantAlone) {
  const StreamId foreign = ForeignStream();
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}})->status.ok());
  ASSERT_TRUE(h_.Abort(stream_, 1)->status.ok());
  ExpectCode(*h_.Query(stream_, 1, 0, 0, 1, 0, 2, 5), absl::StatusCode::kAborted, "step_aborted");
  ExpectCode(*h_.Query(foreign, 1, 0, 0, 1, 0, 2, 5), absl::StatusCode::kNotFound,
             "step_not_found");
}

TEST_F(EngineRefusalsTest, OneMissingRowIsNamed) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 4}})->status.ok());
  const std::vector<Row> rows = Rows(4, 1);
  auto all = h_.AppendOnly(stream_, 1, 0, 0, rows);
  auto most = h_.AppendOnly(stream_, 1, 1, 0, {rows.begin(), rows.begin() + 3});
  h_.Run();
  auto refused = h_.End(stream_, 1);
  ExpectCode(*refused, absl::StatusCode::kFailedPrecondition, "rows_missing");
  EXPECT_EQ(refused->detail.got, "layer 1: rows 3..3");
  ASSERT_TRUE(h_.End(stream_, 1, {3})->status.ok());
  EXPECT_EQ(h_.Get(seq.id).length, 3);
}

// Rows that were accepted and then failed are as if they had never come: they and the rows after
// them may be sent again.
TEST_F(EngineRefusalsTest, RowsThatFailedMayBeSentAgain) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 3}})->status.ok());
  const std::vector<Row> rows = Rows(3, 1);
  auto late = h_.Unsent(stream_, 1, 0, 0, 2, {rows[0], rows[1]}, 0, 2, 5);
  late->attend.timeout_us = 1000;
  h_.Submit(late.get());
  auto behind = h_.Attend(stream_, 1, 0, 2, {rows[2]}, 7);
  h_.AdvanceMicros(2000);
  ExpectCode(*late, absl::StatusCode::kDeadlineExceeded, "deadline");
  ExpectCode(*behind, absl::StatusCode::kFailedPrecondition, "rows_out_of_order");
  ExpectCode(*h_.Attend(stream_, 1, 0, 2, {rows[2]}, 7), absl::StatusCode::kFailedPrecondition,
             "rows_out_of_order");
  auto again = h_.Attend(stream_, 1, 0, 0, rows, 5);
  h_.Run();
  ASSERT_TRUE(again->answered());
  ASSERT_TRUE(again->status.ok()) << again->status;
  EXPECT_LT(h_.Error(*again, Pointers(rows), {1, 2, 3}, 5), testing::kTolerance);
}

class EngineCutRequestTest : public EngineCoreTest {
 protected:
  static testing::HarnessOptions TwoRowsALaunch() {
    testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
    options.limits.prefill_rows = 2;
    return options;
  }
};

// A launch takes the first rows of a message and the rest runs out of time: stored rows stay, and
// the refusal names the row from which to send again.
TEST_F(EngineCutRequestTest, RowsOfACutMessageThatAreStoredStay) {
  testing::EngineHarness h(TwoRowsALaunch());
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const SequenceInfo seq = h.Open();
  ASSERT_TRUE(h.Begin(stream, 1, {{seq.id, 1, 0, 6}})->status.ok());
  const std::vector<Row> rows = Rows(6, 1);
  const auto part = [&](int first, int end) {
    return std::vector<Row>(rows.begin() + first, rows.begin() + end);
  };
  auto cut = h.Unsent(stream, 1, 0, 0, 5, part(0, 5), 0, 2, 5);
  cut->attend.timeout_us = 1000;
  h.Submit(cut.get());
  auto behind = h.Attend(stream, 1, 0, 5, part(5, 6), 7);
  auto waits = h.Query(stream, 1, 0, 1, 1, 0, 2, 9);  // of a stored row
  ASSERT_TRUE(h.core().launches().Start());
  ASSERT_TRUE(h.core().launches().Complete(/*wait=*/true));
  EXPECT_FALSE(cut->answered());
  h.AdvanceMicros(2000);
  ExpectCode(*cut, absl::StatusCode::kDeadlineExceeded, "deadline");
  EXPECT_EQ(cut->detail.next_row, 2);
  EXPECT_EQ(cut->status.message(),
            "no launch took row 2 of the request within 1000 us of its arrival");
  EXPECT_FALSE(cut->step_aborted);
  ExpectCode(*behind, absl::StatusCode::kFailedPrecondition, "rows_out_of_order");
  EXPECT_EQ(behind->detail.next_row, 2);

  // The message as it was is refused, and so are other bytes for rows that are stored.
  auto whole = h.Attend(stream, 1, 0, 0, part(0, 5), 5);
  ExpectCode(*whole, absl::StatusCode::kFailedPrecondition, "rows_out_of_order");
  EXPECT_EQ(whole->detail.next_row, 2);
  auto others = h.Attend(stream, 1, 0, 0, part(2, 4), 5);
  h.Run();
  ExpectCode(*others, absl::StatusCode::kAlreadyExists, "kv_rows_differ");
  EXPECT_EQ(others->detail.next_row, -1);
  EXPECT_TRUE(waits->answered());

  // Stored rows may be committed, but not together with missing ones.
  ExpectCode(*h.End(stream, 1), absl::StatusCode::kFailedPrecondition, "rows_missing");
  auto again = h.Attend(stream, 1, 0, 0, part(0, 2), 5);
  auto rest = h.Attend(stream, 1, 0, 2, part(2, 6), 11);
  auto second_layer = h.AppendOnly(stream, 1, 1, 0, rows);
  h.Run();
  ASSERT_TRUE(again->status.ok() && rest->status.ok() && second_layer->status.ok())
      << again->status << rest->status << second_layer->status;
  EXPECT_LT(h.Error(*again, Pointers(rows), {1, 2}, 5), testing::kTolerance);
  EXPECT_LT(h.Error(*rest, Pointers(rows), {3, 4, 5, 6}, 11), testing::kTolerance);
  ASSERT_TRUE(h.End(stream, 1)->status.ok());
  EXPECT_EQ(h.Get(seq.id).length, 6);
}

TEST_F(EngineCutRequestTest, StoredRowsOfACutMessageMayBeCommitted) {
  testing::EngineHarness h(TwoRowsALaunch());
  const StreamId stream = h.core().steps().OpenStream(h.tenant());
  const SequenceInfo seq = h.Open();
  ASSERT_TRUE(h.Begin(stream, 1, {{seq.id, 1, 0, 5}})->status.ok());
  const std::vector<Row> rows = Rows(5, 1);
  auto first = h.AppendOnly(stream, 1, 1, 0, rows);
  h.Run();
  auto cut = h.Unsent(stream, 1, 0, 0, 5, rows, 0, 2, 5);
  cut->attend.timeout_us = 1000;
  h.Submit(cut.get());
  ASSERT_TRUE(h.core().launches().Start());
  ASSERT_TRUE(h.core().launches().Complete(/*wait=*/true));
  h.AdvanceMicros(2000);
  ASSERT_EQ(cut->detail.next_row, 2);
  ASSERT_TRUE(h.End(stream, 1, {2})->status.ok());
  EXPECT_EQ(h.Get(seq.id).length, 2);
  ASSERT_TRUE(h.Begin(stream, 2, {{seq.id, 1, 2, 1}})->status.ok());
  auto next = h.Attend(stream, 2, 0, 0, {rows[4]}, 3);
  h.Run();
  const std::vector<Row> seen = {rows[0], rows[1], rows[4]};
  EXPECT_LT(h.Error(*next, Pointers(seen), {3}, 3), testing::kTolerance);
}

// The transport sizes a request's memory by the model that it believes the step to have.
TEST_F(EngineRefusalsTest, ARequestSizedForAnotherModelIsRefused) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 1}})->status.ok());
  for (const int32_t change : {0, 1, 2, 3, 4, 5}) {
    auto request = h_.Unsent(stream_, 1, 0, 0, 1, Rows(1, 1), 0, 2, 5);
    kernels::Geometry& geometry = request->attend.sized_for;
    geometry = h_.model().geometry;
    int32_t* const dims[] = {&geometry.num_heads, &geometry.kv_lora_rank, &geometry.rope_dim,
                             &geometry.nope_dim, &geometry.v_dim};
    if (change < 5) ++*dims[change];
    h_.Submit(request.get());
    h_.Run();
    if (change < 5) {
      ExpectCode(*request, absl::StatusCode::kFailedPrecondition, "step_reused");
    } else {
      EXPECT_TRUE(request->status.ok()) << request->status;
    }
  }
}

// A client resumes from the committed rows of the sequence that a refusal is about.
TEST_F(EngineRefusalsTest, RefusalsSayWhatIsCommitted) {
  const SequenceInfo a = h_.Open(), b = h_.Open();
  Fill(a, 3, 1);
  Fill(b, 5, 2);
  const std::vector<StepSequenceArgs> both = {{a.id, 1, 3, 2}, {b.id, 1, 5, 2}};
  ASSERT_TRUE(h_.Begin(stream_, 1, both)->status.ok());
  // The first sequence has its rows at both layers, the second one at one layer only.
  auto all = h_.AppendOnly(stream_, 1, 0, 0, Rows(4, 1));
  auto some = h_.AppendOnly(stream_, 1, 1, 0, Rows(2, 1));
  auto late = h_.Query(stream_, 1, 1, 2, 1, 0, 2, 5);
  h_.Run();
  auto missing = h_.End(stream_, 1, {2, 2});
  EXPECT_FALSE(missing->answered());  // it waits for the query
  h_.Advance(testing::TinyLimits().kv_wait_ms);
  ExpectCode(*late, absl::StatusCode::kFailedPrecondition, "kv_rows_missing");
  EXPECT_EQ(late->detail.last_good_position, 5);
  EXPECT_EQ(late->detail.limit, "rows up to 1, which have arrived");
  ExpectCode(*missing, absl::StatusCode::kFailedPrecondition, "rows_missing");
  EXPECT_EQ(missing->detail.last_good_position, 5);
  ASSERT_TRUE(h_.Abort(stream_, 1)->status.ok());
  auto gone = h_.Query(stream_, 1, 0, 0, 1, 0, 2, 5);
  ExpectCode(*gone, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_EQ(gone->detail.last_good_position, 3);
  EXPECT_EQ(gone->detail.field, "step_id");
}

TEST_F(EngineRefusalsTest, WaitingRequestsOfADroppedStepSayWhatIsCommitted) {
  const SequenceInfo seq = h_.Open();
  Fill(seq, 3, 1);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 3, 2}})->status.ok());
  auto waiting = h_.Query(stream_, 1, 0, 0, 1, 0, 2, 5);
  std::vector<SequenceId> not_found;
  h_.core().sequences().Release(h_.tenant(), std::vector<SequenceId>{seq.id}, &not_found);
  ExpectCode(*waiting, absl::StatusCode::kAborted, "step_aborted");
  EXPECT_EQ(waiting->detail.last_good_position, 3);
}

// "rows up to -1" would not be a useful limit.
TEST_F(EngineRefusalsTest, NoRowMayHaveArrived) {
  const SequenceInfo seq = h_.Open();
  ASSERT_TRUE(h_.Begin(stream_, 1, {{seq.id, 1, 0, 2}})->status.ok());
  auto late = h_.Query(stream_, 1, 0, 0, 2, 0, 2, 5);
  h_.Advance(testing::TinyLimits().kv_wait_ms);
  ExpectCode(*late, absl::StatusCode::kFailedPrecondition, "kv_rows_missing");
  EXPECT_EQ(late->detail.got, "rows up to 1");
  EXPECT_EQ(late->detail.limit, "no row, as none has arrived");
}

TEST_F(EngineRefusalsTest, TheRowsOfAllSequencesTogetherAreBounded) {
  const int32_t limit = testing::TinyLimits().max_step_rows;
  const SequenceInfo a = h_.Open();
  const SequenceInfo b = h_.Open();
  auto refused = h_.Begin(stream_, 1, {{a.id, 1, 0, limit}, {b.id, 1, 0, 1}});
  ExpectCode(*refused, absl::StatusCode::kInvalidArgument, "out_of_range");
  EXPECT_EQ(refused->detail.field, "begin_step.sequences");
  EXPECT_EQ(refused->detail.got, std::to_string(limit + 1));
  for (const SequenceId id : {a.id, b.id}) EXPECT_FALSE(h_.Get(id).in_step);
  EXPECT_TRUE(h_.Begin(stream_, 1, {{a.id, 1, 0, limit - 1}, {b.id, 1, 0, 1}})->status.ok());
}

}  // namespace
}  // namespace mla::scheduler
