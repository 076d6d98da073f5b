#include "tests/bench/gpu/trace/server_trace.h"

#include "gtest/gtest.h"

namespace mla::bench {
namespace {

TEST(ServerTraceTest, AddsUpWhatCountsAndGivesALayersShare) {
  const ServerTrace before = ParseTrace(
      "# TYPE mla_device_sleeps_total counter\n"
      "mla_device_sleeps_total{with=\"launch\"} 1\n"
      "mla_device_sleeps_total{with=\"client\"} 2\n"
      "mla_copied_bytes_total{path=\"inline\"} 100\n"
      "mla_device_copied_bytes_total 10\n"
      "mla_device_polling_seconds_total{with=\"launch\"} 0.5\n"
      "mla_device_polling_seconds_total{with=\"client\"} 0.25\n");
  EXPECT_EQ(before.copied_bytes, 110);
  EXPECT_EQ(before.sleeps, 3);
  EXPECT_DOUBLE_EQ(before.launch_polling_us, 5e5);
  EXPECT_DOUBLE_EQ(before.client_polling_us, 2.5e5);
  ServerTrace after = before;
  after.copied_bytes += 40;
  after.sleeps += 1;
  after.launch_polling_us += 80;
  after.client_polling_us += 8;
  const ServerTrace layer = after.Since(before, 4);
  EXPECT_EQ(layer.copied_bytes, 10);
  EXPECT_EQ(layer.sleeps, 0.25);
  EXPECT_DOUBLE_EQ(layer.launch_polling_us, 20);
  EXPECT_DOUBLE_EQ(layer.client_polling_us, 2);
}

TEST(ServerTraceTest, SaysWhatIsNotThere) {
  EXPECT_EQ(ReadTrace("nowhere").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadTrace("127.0.0.1:1").status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace mla::bench
