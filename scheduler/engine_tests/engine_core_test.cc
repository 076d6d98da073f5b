// The step rules of the contract, one by one, stepped by hand.
#include "scheduler/engine/engine_core.h"

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/testing/engine_fixture.h"

namespace mla::scheduler {
namespace {

using testing::EngineCoreTest;
using testing::EngineHarness;
using ::testing::HasSubstr;
using testing::kTolerance;
using testing::Pointers;
using testing::Row;
using testing::Rows;
using testing::TestRequest;

TEST_F(EngineCoreTest, ListsOfAllTenantsComeInParts) {
  const TenantRef other = *h_.core().tenants().Enter("tenant-b");
  ASSERT_TRUE(h_.core().models().Register(other->key(), h_.model()).ok());
  std::map<SequenceId, std::string> owners;
  for (int i = 0; i < 3; ++i) owners[h_.Open().id] = h_.tenant();
  Fill(h_.Get(owners.begin()->first), 2, 1);
  h_.Advance(70);
  OpenArgs args;
  args.tenant = "tenant-b";
  args.model_id = h_.model().id;
  args.client_id = "c";
  for (int i = 0; i < 2; ++i) owners[h_.core().sequences().Open(args)->id] = "tenant-b";
  h_.Advance(5);
  const SequenceControl& sequences = h_.core().sequences();
  std::map<SequenceId, std::string> seen;
  SequencePage page{.all_tenants = true, .most = 2};
  for (bool more = true; more;) {
    const SequenceList part = sequences.Get({"tenant-c", {}, ""}, page);
    more = part.more;
    EXPECT_EQ(part.sequences.size(), more ? 2u : 1u);
    for (const SequenceInfo& info : part.sequences) {
      EXPECT_GT(info.id, page.after) << "in the order of their ids";
      page.after = info.id;
      seen[info.id] = info.tenant;
      EXPECT_EQ(info.age_ms, info.tenant == "tenant-b" ? 5 : 75);
      EXPECT_EQ(info.kv_bytes > 0, info.id == owners.begin()->first);
    }
  }
  EXPECT_EQ(seen, owners);
  // A client's, and a part that is exactly full.
  EXPECT_EQ(sequences.Get({"", {}, "c"}, {.all_tenants = true}).sequences.size(), 2u);
  EXPECT_FALSE(sequences.Get({"", {}, ""}, {.all_tenants = true, .most = 5}).more);
  // A tenant's list has only its own, and does not name it.
  const SequenceList own = sequences.Get({"tenant-b", {}, ""}, {.most = 1});
  ASSERT_EQ(own.sequences.size(), 1u);
  EXPECT_TRUE(own.more);
  EXPECT_EQ(owners[own.sequences[0].id], "tenant-b");
  EXPECT_EQ(own.sequences[0].tenant, "");
}

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
  EXPECT_EQ(position->detail.field, "begin_step.sequences[0].start_position");
  EXPECT_EQ(position->detail.last_good_position, 4);
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

TEST_F(EngineCoreTest, AFullPoolRefusesTheStepAsAWhole) {
  testing::HarnessOptions options{testing::TinyLimits(), testing::TinyModel(), nullptr, nullptr};
  options.limits.kv_cache_bytes = 1 << 16;  // 256 groups of 256 bytes
  options.limits.max_sequence_rows = 3000;
  options.limits.max_pages_per_sequence = 1000;
  options.limits.max_step_rows = 3000;
  EngineHarness small(std::move(options));
  const StreamId stream = small.core().steps().OpenStream(small.tenant());
  const SequenceInfo a = small.Open();
  const SequenceInfo b = small.Open();
  const int64_t used = small.core().Stats().kv_bytes_used;
  auto begin = small.Begin(stream, 1, {{a.id, 1, 0, 3}, {b.id, 1, 0, 2900}});
  ExpectCode(*begin, absl::StatusCode::kResourceExhausted, "pages_exhausted");
  EXPECT_GT(begin->detail.retry_after_ms, 0);
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
  EXPECT_THAT(end->detail.got, HasSubstr("layer 1: rows 0..3"));
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
  h_.Submit(request.get());
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

TEST_F(EngineCoreTest, LongPrefillIsCutAndDecodeGoesFirst) {
  const SequenceInfo prompt = h_.Open();
  const SequenceInfo chat = h_.Open();
  Fill(chat, 3, 1);
  ASSERT_TRUE(h_.Begin(stream_, 1, {{prompt.id, 1, 0, 14}})->status.ok());
  ASSERT_TRUE(h_.Begin(stream_, 2, {{chat.id, 1, 3, 1}})->status.ok());
  auto prefill = h_.Attend(stream_, 1, 0, 0, Rows(14, 40), 5);
  auto decode = h_.Attend(stream_, 2, 1, 0, Rows(1, 60), 6);
  ASSERT_TRUE(h_.core().launches().Start());
  ASSERT_TRUE(h_.core().launches().Complete(true));
  // It goes in the first launch, together with the first piece of the prefill.
  EXPECT_TRUE(decode->answered());
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

}  // namespace
}  // namespace mla::scheduler
