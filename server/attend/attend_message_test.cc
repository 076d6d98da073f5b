// A stream fills one reply again and again: nothing of the last reply may stay.
#include "server/attend/attend_message.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

void FillAttend(AttendMessage& message) {
  message.kind = RequestKind::kAttend;
  message.tag = 7;
  message.attend.row_begin = 1;
  message.attend.row_count = 2;
  message.attend.head_offset = 16;
  message.attend.num_heads = 8;
  message.attend.layer = 5;
  message.attend.o_dtype = kernels::DType::kF32;
  message.timings = {.queue_ns = 3000,
                     .plan_ns = 4000,
                     .kernel_ns = 5000,
                     .launch_requests = 6,
                     .launch_layers = 7,
                     .launch_clients = 8,
                     .plan_reused = true};
}

// Requests of every kind, with fields set and with fields that are zero.
std::vector<std::function<void(AttendMessage&)>> AllKinds() {
  return {
      FillAttend,
      [](AttendMessage& message) { message.kind = RequestKind::kAttend; },
      [](AttendMessage& message) {
        message.kind = RequestKind::kBeginStep;
        message.total_rows = 3;
      },
      [](AttendMessage& message) {
        message.kind = RequestKind::kEndStep;
        message.lengths = {4, 5};
      },
      [](AttendMessage& message) { message.kind = RequestKind::kAbortStep; },
      [](AttendMessage& message) {
        FillAttend(message);
        message.answer = absl::InternalError("why");
        message.step_aborted = true;
      },
  };
}

std::string TextOf(v1::AttendStreamReply reply) {
  if (reply.has_timings()) reply.mutable_timings()->set_write_us(0);  // depends on the clock
  return reply.ShortDebugString();
}

TEST(AttendMessageTest, NothingOfTheLastReplyStays) {
  const auto kinds = AllKinds();
  for (const auto& first : kinds) {
    for (const auto& second : kinds) {
      AttendMessage before, message;
      first(before);
      second(message);
      v1::AttendStreamReply used, fresh;
      before.FillReply(11, &used);
      message.FillReply(12, &used);
      message.FillReply(12, &fresh);
      EXPECT_EQ(TextOf(used), TextOf(fresh));
    }
  }
}

TEST(AttendMessageTest, SaysWhatTheRequestWas) {
  AttendMessage message;
  FillAttend(message);
  message.answered_ns = SteadyNanos();
  v1::AttendStreamReply reply;
  message.FillReply(12, &reply);
  EXPECT_EQ(TextOf(reply),
            "tag: 7 boot_id: 12 attend { row_begin: 1 row_count: 2 head_offset: 16 num_heads: 8 "
            "layer: 5 o_dtype: DTYPE_F32 } timings { queue_us: 3 plan_us: 4 kernel_us: 5 "
            "launch_requests: 6 launch_layers: 7 launch_clients: 8 plan_reused: true }");
}

}  // namespace
}  // namespace mla::server
