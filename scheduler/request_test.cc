#include "scheduler/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace mla::scheduler {
namespace {

class Request final : public StreamRequest {
 public:
  void Done(const absl::Status& status) override { last = status; }
  absl::Status last;
};

RequestState After(const std::vector<RequestState::Value>& states) {
  RequestState state;
  for (const RequestState::Value next : states) state.Enter(next);
  return state;
}

TEST(RequestStateTest, GoesTheWayOfEachKind) {
  using enum RequestState::Value;
  const RequestState answered = After({kAdmitted, kAnswered, kOutside});
  EXPECT_TRUE(answered == kOutside);
  // Launched in two parts, and submitted again.
  const RequestState again = After(
      {kAdmitted, kWaiting, kTaken, kWaiting, kTaken, kAnswered, kOutside, kAdmitted, kWaiting});
  EXPECT_TRUE(again == kWaiting);
  EXPECT_FALSE(again == kTaken);
  const RequestState ended = After({kAdmitted, kEnding, kAnswered});
  EXPECT_TRUE(ended == kAnswered);
}

TEST(RequestStateDeathTest, EndsTheProcessOnAnyOtherWay) {
  using enum RequestState::Value;
  EXPECT_DEATH(After({kAdmitted, kAdmitted}), "admitted cannot be admitted") << "sent twice";
  EXPECT_DEATH(After({kWaiting}), "outside cannot be waiting") << "not counted";
  EXPECT_DEATH(After({kAdmitted, kWaiting, kWaiting}), "waiting cannot be waiting") << "two queues";
  EXPECT_DEATH(After({kAdmitted, kWaiting, kAnswered}), "waiting cannot be answered")
      << "still linked to its neighbours in the queue";
  EXPECT_DEATH(After({kAdmitted, kAnswered, kAnswered}), "answered cannot be answered");
  EXPECT_DEATH(After({kAdmitted, kEnding, kWaiting}), "ending cannot be waiting");
  EXPECT_DEATH(After({kAdmitted, kOutside}), "admitted cannot be outside") << "no answer";
}

TEST(EngineFieldsTest, ANewLifeForgetsTheEarlierOne) {
  Request other;
  StreamRequest::EngineFields fields;
  fields.Begin(100, /*was_handed_back=*/false);
  fields.next = fields.queue_next = fields.sibling = &other;
  fields.deadline_ns = fields.blocked_since_ns = fields.total_ns = 7;
  fields.rows_done = fields.rows_launched = fields.batch_index = 3;
  fields.bad_row = fields.bad_head = fields.other_row = 2;
  fields.repeat = fields.bad_inputs = fields.ahead = true;
  fields.status = absl::InternalError("of the earlier life");
  fields.state.Enter(RequestState::kAnswered);
  fields.state.Enter(RequestState::kOutside);
  StreamRequest::EngineFields back = fields;

  fields.Begin(500, /*was_handed_back=*/false);
  EXPECT_TRUE(fields.state == RequestState::kAdmitted);
  EXPECT_EQ(fields.next, nullptr);
  EXPECT_EQ(fields.queue_next, nullptr);
  EXPECT_EQ(fields.sibling, nullptr);
  EXPECT_EQ(fields.deadline_ns + fields.blocked_since_ns + fields.total_ns, 0);
  EXPECT_EQ(fields.rows_done + fields.rows_launched + fields.batch_index, 0);
  EXPECT_THAT((std::vector{fields.bad_row, fields.bad_head, fields.other_row}), testing::Each(-1));
  EXPECT_FALSE(fields.repeat || fields.bad_inputs || fields.ahead);
  EXPECT_TRUE(fields.status.ok());
  EXPECT_EQ(fields.arrival_ns, 500);
  EXPECT_EQ(fields.first_arrival_ns, 500);

  back.Begin(500, /*was_handed_back=*/true);
  EXPECT_EQ(back.arrival_ns, 500);
  EXPECT_EQ(back.first_arrival_ns, 100) << "the client has waited since then";
  EXPECT_EQ(back.rows_done, 0);
}

TEST(StreamRequestTest, ResetLeavesNothingButTheMemoryOfLists) {
  Request request;
  request.kind = RequestKind::kEndStep;
  request.stream = request.step_id = 5;
  request.leave_launch = true;
  request.begin.model_id = "of another tenant";
  request.begin.participants = 4;
  request.begin.lease_ms = 9;
  request.begin.sequences.resize(8);
  request.begin.positions = std::make_shared<const std::vector<StepSequenceArgs>>();
  request.attend.row_count = 2;
  request.end.committed_rows.resize(8);
  request.end.tails.resize(8);
  request.end.lengths_max = 1;
  request.total_rows = request.joined = 3;
  request.lengths.resize(8);
  request.timings.kernel_ns = 6;
  request.signalled = request.step_aborted = true;
  request.handed_back = HandedBack::kLate;
  request.Reset();
  EXPECT_EQ(request.kind, RequestKind::kAttend);
  EXPECT_EQ(request.stream + request.step_id, 0u);
  EXPECT_EQ(request.begin.model_id, "");
  EXPECT_EQ(request.begin.participants, 1);
  EXPECT_EQ(request.begin.lease_ms, 0);
  EXPECT_EQ(request.begin.positions, nullptr);
  EXPECT_EQ(request.attend.row_count, 0);
  EXPECT_EQ(request.end.lengths_max, EndStepArgs().lengths_max);
  EXPECT_EQ(request.total_rows + request.joined, 0);
  EXPECT_EQ(request.timings.kernel_ns, 0);
  EXPECT_FALSE(request.signalled || request.step_aborted || request.leave_launch);
  EXPECT_EQ(request.handed_back, HandedBack::kNo);
  EXPECT_TRUE(request.begin.sequences.empty() && request.end.committed_rows.empty() &&
              request.end.tails.empty() && request.lengths.empty());
  EXPECT_GE(request.begin.sequences.capacity(), 8u);
  EXPECT_GE(request.end.committed_rows.capacity(), 8u);
  EXPECT_GE(request.end.tails.capacity(), 8u);
  EXPECT_GE(request.lengths.capacity(), 8u);
}

TEST(StreamRequestDeathTest, TheEnginesRequestIsNotReset) {
  Request request;
  request.engine.Begin(1, /*was_handed_back=*/false);
  EXPECT_DEATH(request.Reset(), "admitted cannot be outside");
}

}  // namespace
}  // namespace mla::scheduler
