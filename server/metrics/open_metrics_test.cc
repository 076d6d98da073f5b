#include "server/metrics/open_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "server/metrics/metrics.h"

namespace mla::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(WantsOpenMetrics, TakesItOnlyFromThoseThatPreferIt) {
  // As Prometheus 2 and 3 send it.
  EXPECT_TRUE(WantsOpenMetrics(
      "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
      "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"));
  EXPECT_TRUE(WantsOpenMetrics("application/openmetrics-text"));
  EXPECT_TRUE(WantsOpenMetrics("text/plain;q=0.5, Application/OpenMetrics-Text; q=0.5"));
  for (const char* const other :
       {"", "*/*", "text/plain", "application/json", "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=x", "application/openmetrics-text;version=2.0.0",
        "text/plain;q=0.9,application/openmetrics-text;q=0.8", ",;,;q=", "application/*"}) {
    EXPECT_FALSE(WantsOpenMetrics(other)) << other;
  }
  const std::string accept = "application/openmetrics-text," + std::string(kMaxAcceptBytes, 'a');
  EXPECT_FALSE(WantsOpenMetrics(accept));
  EXPECT_TRUE(WantsOpenMetrics(accept.substr(0, kMaxAcceptBytes)));
}

TEST(OpenMetricsText, IsAsTheSpecificationHasIt) {
  std::vector<prometheus::MetricFamily> families(3);
  families[0] = {"a_total", "Things\n\"b\\", prometheus::MetricType::Counter, {}};
  families[0].metric.resize(1);
  families[0].metric[0].label = {{"who", "x\"y\n"}};
  families[0].metric[0].counter.value = 3;
  families[1] = {"b", "", prometheus::MetricType::Gauge, {}};
  families[1].metric.resize(1);
  families[1].metric[0].gauge.value = 0.25;
  families[2] = {"c", "C.", prometheus::MetricType::Histogram, {}};
  families[2].metric.resize(1);
  auto& histogram = families[2].metric[0].histogram;
  histogram.bucket = {
      {1, 1e-5}, {2, 1}, {2, 1 << 20}, {3, std::numeric_limits<double>::infinity()}};
  histogram.sample_count = 3;
  histogram.sample_sum = 2.5;
  const BucketExemplar exemplar = {"c", "", 1, {0.5, std::string(32, 'f'), 12.25}};
  EXPECT_EQ(OpenMetricsText(families, {exemplar}),
            "# TYPE a counter\n"
            "# HELP a Things\\n\\\"b\\\\\n"
            "a_total{who=\"x\\\"y\\n\"} 3.0\n"
            "# TYPE b gauge\n"
            "# HELP b \n"
            "b 0.25\n"
            "# TYPE c histogram\n"
            "# HELP c C.\n"
            "c_bucket{le=\"1e-05\"} 1\n"
            "c_bucket{le=\"1.0\"} 2 # {trace_id=\"ffffffffffffffffffffffffffffffff\"} 0.5 12.250\n"
            "c_bucket{le=\"1.048576e+06\"} 2\n"
            "c_bucket{le=\"+Inf\"} 3\n"
            "c_count 3\n"
            "c_sum 2.5\n"
            "# EOF\n");
}

// The last trace of a bucket is shown, in the histograms that have counted its request.
TEST(Exemplars, AreOfTheBucketOfTheirValue) {
  Metrics metrics;
  const std::string first(32, 'a'), last(32, 'b'), slow(32, 'c');
  metrics.ShowTrace(scheduler::RequestKind::kAttend, 15'000, 0, first);
  metrics.ShowTrace(scheduler::RequestKind::kAttend, 16'000, 0, last);
  metrics.ShowTrace(scheduler::RequestKind::kEndStep, int64_t{1} << 62, -1, slow);
  const std::string text = metrics.Expose({}, /*open_metrics=*/true);
  EXPECT_THAT(text, Not(HasSubstr(first)));
  const std::string name = "mla_request_duration_seconds_bucket{kind=";
  EXPECT_THAT(text,
              HasSubstr(name + "\"attend\",le=\"2e-05\"} 0 # {trace_id=\"" + last + "\"} 1.6"));
  EXPECT_THAT(text, HasSubstr(name + "\"end_step\",le=\"+Inf\"} 0 # {trace_id=\"" + slow));
  EXPECT_THAT(text,
              HasSubstr("mla_request_queue_seconds_bucket{le=\"1e-05\"} 0 # {trace_id=\"" + last));
  // Plain text has none.
  EXPECT_THAT(metrics.Expose({}), Not(HasSubstr("trace_id")));
}

}  // namespace
}  // namespace mla::server
