// The loop with steps of known cost and no server, so that its results can be predicted.
#include "client/mlactl/load/load_loop.h"

#include <gtest/gtest.h>

#include <thread>

#include "client/cpp/streams/errors.h"

namespace mla::mlactl {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

LoadHooks Hooks(std::function<absl::Status(uint32_t, LoadRecorder*)> step) {
  LoadHooks hooks;
  hooks.set_up = [](uint32_t) { return absl::OkStatus(); };
  hooks.step = std::move(step);
  hooks.tear_down = [](uint32_t) {};
  return hooks;
}

absl::Status Nap(milliseconds time) {
  std::this_thread::sleep_for(time);
  return absl::OkStatus();
}

double Millis(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

class LoadLoopTest : public testing::Test {
 protected:
  LoadResult Run(const LoadHooks& hooks) {
    auto result = RunLoad(options_, hooks, interrupted_);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : LoadResult{};
  }

  LoadOptions options_;
  std::atomic<bool> interrupted_{false};
};

TEST_F(LoadLoopTest, ClosedLoopMeasuresStepsAndTheirRate) {
  options_.concurrency = 3;
  options_.warmup_s = 0.1;
  options_.duration_s = 1;
  const LoadResult result =
      Run(Hooks([](uint32_t, LoadRecorder*) { return Nap(milliseconds(10)); }));
  EXPECT_EQ(result.seconds, 1);
  EXPECT_FALSE(result.interrupted);
  EXPECT_GE(Millis(result.counts.of(Stage::kStep).min_ns()), 10);
  EXPECT_LT(Millis(result.counts.of(Stage::kStep).ValueAt(0.5)), 100);
  EXPECT_LE(result.counts.steps, 300u);
  EXPECT_GT(result.counts.steps, 20u);
  EXPECT_EQ(result.counts.of(Stage::kStep).count(), result.counts.steps);
  EXPECT_EQ(result.counts.of(Stage::kStartDelay).count(), 0u);
  EXPECT_EQ(result.counts.unfinished, 0u);
  ASSERT_GT(result.series.size(), 3u);
  EXPECT_NEAR(result.series.back().at_s, 1, 0.3);
}

// All workers stall once. A closed loop measures one long step a worker; in an open loop every
// arrival during the stall has waited.
TEST_F(LoadLoopTest, OpenLoopChargesAStallToEveryArrivalThatItDelays) {
  options_.concurrency = 2;
  options_.warmup_s = 0;
  options_.duration_s = 2;
  std::atomic<int> stalls{0};
  LoadClock::time_point begin;
  const auto step = [&](uint32_t, LoadRecorder*) {
    const bool late = LoadClock::now() - begin > milliseconds(500);
    if (late && stalls.fetch_add(1) < 2) return Nap(milliseconds(600));
    return Nap(milliseconds(1));
  };
  begin = LoadClock::now();
  const LoadResult closed = Run(Hooks(step));
  EXPECT_LT(Millis(closed.counts.of(Stage::kStep).ValueAt(0.9)), 300);
  EXPECT_GE(Millis(closed.counts.of(Stage::kStep).max_ns()), 600);

  stalls = 0;
  options_.rate_per_s = 50;  // a busy machine reaches it too
  options_.arrivals = ArrivalKind::kUniform;
  begin = LoadClock::now();
  const LoadResult open = Run(Hooks(step));
  const LatencyHistogram& steps = open.counts.of(Stage::kStep);
  EXPECT_NEAR(static_cast<double>(steps.count()), 99, 2);
  // 30 of 100 arrivals fall into the stall and wait 600 ms down to 0.
  EXPECT_GT(Millis(steps.ValueAt(0.95)), 450);
  EXPECT_GT(Millis(steps.ValueAt(0.85)), 250);
  EXPECT_LT(Millis(steps.ValueAt(0.40)), 200);
  EXPECT_GT(Millis(open.counts.of(Stage::kStartDelay).ValueAt(0.95)), 450);
  // On a busy machine some steps are unfinished when the time is up.
  EXPECT_NEAR(static_cast<double>(open.counts.steps + open.counts.unfinished), 99, 4);
}

// Twice the workers' capacity: steps that did not run count as slow, not as absent.
TEST_F(LoadLoopTest, OverloadShowsInTheLatencies) {
  options_.rate_per_s = 100;
  options_.arrivals = ArrivalKind::kUniform;
  options_.warmup_s = 0;
  options_.duration_s = 1;
  const LoadResult result =
      Run(Hooks([](uint32_t, LoadRecorder*) { return Nap(milliseconds(20)); }));
  EXPECT_LE(result.counts.steps, 50u);
  EXPECT_GT(result.counts.unfinished, 20u);
  EXPECT_EQ(result.counts.of(Stage::kStep).count(), 99u);
  EXPECT_GT(Millis(result.counts.of(Stage::kStep).ValueAt(0.9)), 450);
}

TEST_F(LoadLoopTest, SplitsWhatTheServerReports) {
  options_.warmup_s = 0;
  options_.steps = 100;
  const LoadResult result = Run(Hooks([](uint32_t, LoadRecorder* recorder) {
    const LoadClock::time_point done = LoadClock::now();
    client::AttendTimes times;
    times.queue_us = 10;
    times.plan_us = 20;
    times.kernel_us = 300;
    times.write_us = 40;
    times.launch_requests = 4;
    times.launch_layers = 2;
    times.launch_clients = 3;
    times.plan_reused = true;
    recorder->Begin(done - microseconds(5), done);
    recorder->Attend(done - microseconds(500), done, times, 1000);
    recorder->End(done - microseconds(7), done);
    return Nap(milliseconds(1));
  }));
  const LoadCounts& counts = result.counts;
  const auto micros = [&](Stage stage) {
    return static_cast<double>(counts.of(stage).ValueAt(0.5)) * 1e-3;
  };
  EXPECT_NEAR(micros(Stage::kAttend), 500, 1);
  EXPECT_NEAR(micros(Stage::kNetwork), 130, 0.5);
  EXPECT_NEAR(micros(Stage::kQueue), 10, 0.1);
  EXPECT_NEAR(micros(Stage::kPlan), 20, 0.1);
  EXPECT_NEAR(micros(Stage::kKernel), 300, 1);
  EXPECT_NEAR(micros(Stage::kWrite), 40, 0.2);
  EXPECT_NEAR(micros(Stage::kBegin), 5, 0.1);
  EXPECT_NEAR(micros(Stage::kEnd), 7, 0.1);
  EXPECT_EQ(counts.steps, 100u);
  EXPECT_EQ(counts.attends, 100u);
  EXPECT_EQ(counts.bytes, 100000u);
  EXPECT_EQ(counts.launch_requests, 400u);
  EXPECT_EQ(counts.launch_layers, 200u);
  EXPECT_EQ(counts.launch_clients, 300u);
  EXPECT_EQ(counts.plans_reused, 100u);
}

TEST_F(LoadLoopTest, CountsExactlyTheStepsAskedFor) {
  options_.concurrency = 4;
  options_.warmup_s = 0.05;
  options_.steps = 57;
  const LoadResult result =
      Run(Hooks([](uint32_t, LoadRecorder*) { return Nap(milliseconds(2)); }));
  EXPECT_EQ(result.counts.steps, 57u);
  EXPECT_EQ(result.counts.of(Stage::kStep).count(), 57u);
  EXPECT_GT(result.seconds, 57 * 0.002 / 4);
}

TEST_F(LoadLoopTest, FailuresWithAHintAreCountedOthersEndTheRun) {
  v1::ErrorDetail detail;
  detail.set_reason("queue_full");
  detail.set_retry_after_ms(1);
  const absl::Status full = client::MakeStatus(8, "full", detail);
  options_.warmup_s = 0;
  options_.steps = 60;
  int calls = 0;
  const LoadResult result = Run(Hooks(
      [&](uint32_t, LoadRecorder*) { return ++calls % 3 == 0 ? full : Nap(milliseconds(1)); }));
  EXPECT_EQ(result.counts.steps, 60u);
  EXPECT_NEAR(static_cast<double>(result.counts.failures.at("queue_full")), 30, 1);

  options_.steps = 0;
  options_.duration_s = 0.3;
  const auto all =
      RunLoad(options_, Hooks([&](uint32_t, LoadRecorder*) { return full; }), interrupted_);
  EXPECT_EQ(all.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(all.status().message().find("queue_full"), std::string::npos);

  const auto fatal =
      RunLoad(options_, Hooks([&](uint32_t, LoadRecorder*) { return absl::NotFoundError("gone"); }),
              interrupted_);
  EXPECT_EQ(fatal.status(), absl::NotFoundError("gone"));
}

TEST_F(LoadLoopTest, EveryWorkerIsTornDownHoweverItEnds) {
  options_.concurrency = 5;
  options_.duration_s = 60;
  std::atomic<int> down{0};
  LoadHooks hooks = Hooks([](uint32_t, LoadRecorder*) { return Nap(milliseconds(1)); });
  hooks.set_up = [](uint32_t worker) {
    return worker == 3 ? absl::ResourceExhaustedError("no room") : absl::OkStatus();
  };
  hooks.tear_down = [&](uint32_t) { ++down; };
  EXPECT_EQ(RunLoad(options_, hooks, interrupted_).status(),
            absl::ResourceExhaustedError("no room"));
  EXPECT_EQ(down, 5);
}

TEST_F(LoadLoopTest, AnInterruptEndsTheRunWithWhatThereIs) {
  options_.concurrency = 2;
  options_.warmup_s = 0;
  options_.duration_s = 60;
  std::atomic<int> down{0};
  int shown = 0;
  LoadHooks hooks = Hooks([](uint32_t, LoadRecorder* recorder) {
    for (int i = 0; i < 10; ++i) {
      if (recorder->stopping()) return absl::CancelledError();
      Nap(milliseconds(1)).IgnoreError();
    }
    return absl::OkStatus();
  });
  hooks.tear_down = [&](uint32_t) { ++down; };
  hooks.progress = [&](const LoadProgress& progress) {
    ++shown;
    if (progress.steps > 10) interrupted_ = true;
  };
  const LoadResult result = Run(hooks);
  EXPECT_TRUE(result.interrupted);
  EXPECT_GT(result.counts.steps, 10u);
  EXPECT_LT(result.seconds, 30);
  EXPECT_GT(shown, 0);
  EXPECT_EQ(down, 2);
}

}  // namespace
}  // namespace mla::mlactl
