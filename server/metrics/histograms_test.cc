#include "server/metrics/histograms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/metric_family.h>

#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace mla::server {
namespace {

using scheduler::RequestKind;
using ::testing::ElementsAre;

TEST(HistogramTest, CountsUpToEachBound) {
  Histogram histogram("sizes", {1, 2, 4});
  for (const double value : {0.5, 1.0, 1.5, 2.0, 4.0, 4.5, 100.0}) histogram.Observe(value);
  const Distribution got = histogram.Get();
  EXPECT_THAT(got.bounds, ElementsAre(1, 2, 4));
  EXPECT_THAT(got.counts, ElementsAre(2, 4, 5, 7));
  EXPECT_DOUBLE_EQ(histogram.sum(), 113.5);
}

std::map<std::string, prometheus::MetricFamily> Collected(const Histograms& histograms) {
  std::vector<prometheus::MetricFamily> families;
  histograms.Collect(&families);
  std::map<std::string, prometheus::MetricFamily> by_name;
  for (prometheus::MetricFamily& family : families) {
    EXPECT_EQ(family.type, prometheus::MetricType::Histogram) << family.name;
    EXPECT_TRUE(by_name.emplace(family.name, family).second) << family.name << " comes twice";
  }
  return by_name;
}

TEST(HistogramsTest, ShowsOneFamilyForEachName) {
  Histograms histograms;
  scheduler::LaunchReport launch;
  launch.schedule_ns = 5'000;     // within the first bucket, which ends at 10 us
  launch.kernel_ns = 15'000'000;  // 15 ms
  launch.requests = 3;
  launch.rows_decode = 3;
  histograms.ObserveLaunch(launch);
  auto families = Collected(histograms);
  const prometheus::MetricFamily& phases = families.at("mla_launch_duration_seconds");
  ASSERT_EQ(phases.metric.size(), 4u);
  EXPECT_EQ(phases.metric[0].label[0].name, "phase");
  EXPECT_EQ(phases.metric[0].label[0].value, "schedule");
  EXPECT_EQ(phases.metric[0].histogram.bucket.front().cumulative_count, 1u);
  const auto& run = phases.metric[2].histogram;
  EXPECT_EQ(phases.metric[2].label[0].value, "run");
  EXPECT_EQ(run.sample_count, 1u);
  EXPECT_DOUBLE_EQ(run.sample_sum, 0.015);
  EXPECT_TRUE(std::isinf(run.bucket.back().upper_bound));
  for (const auto& bucket : run.bucket) {
    EXPECT_EQ(bucket.cumulative_count, bucket.upper_bound >= 0.015 ? 1u : 0u) << bucket.upper_bound;
  }
  // Stages without rows are not observed.
  const prometheus::MetricFamily& rows = families.at("mla_launch_rows");
  ASSERT_EQ(rows.metric.size(), 3u);
  EXPECT_EQ(rows.metric[0].histogram.sample_count, 1u);
  EXPECT_EQ(rows.metric[1].histogram.sample_count, 0u);
  EXPECT_TRUE(families.at("mla_launch_requests").metric[0].label.empty());
}

TEST(HistogramsTest, QueueTimesAreThoseOfAttendsThatSucceeded) {
  Histograms histograms;
  histograms.ObserveRequest({RequestKind::kAttend, true, 1'000, 2'000});
  histograms.ObserveRequest({RequestKind::kAttend, false, 1'000, 2'000});
  histograms.ObserveRequest({RequestKind::kEndStep, true, 0, 2'000});
  EXPECT_EQ(histograms.QueueTimes().counts.back(), 1u);
  EXPECT_EQ(histograms.AttendTimes().counts.back(), 2u);
}

TEST(HistogramsTest, LosesNothingThatThreadsObserveTogether) {
  constexpr int kThreads = 4, kEach = 1000;
  Histograms histograms;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&histograms] {
      for (int n = 0; n < kEach; ++n) {
        histograms.ObserveLaunch({});
        histograms.ObserveSequence(n, n);
        histograms.ObservePageGroup(n);
      }
    });
  }
  Collected(histograms);  // at the same time
  for (std::thread& thread : threads) thread.join();
  auto families = Collected(histograms);
  for (const char* name : {"mla_launch_layers", "mla_sequence_rows",
                           "mla_sequence_lifetime_seconds", "mla_kv_page_group_lifetime_seconds"}) {
    EXPECT_EQ(families.at(name).metric[0].histogram.sample_count, kThreads * kEach) << name;
  }
}

}  // namespace
}  // namespace mla::server
