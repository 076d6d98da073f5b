// Writes metrics in the text format of OpenMetrics 1.0
// (https://prometheus.io/docs/specs/om/open_metrics_spec/), which has exemplars: traces of requests
// next to the buckets that count them. Scrapers that do not ask for it get Prometheus text.
//
// Pure functions; any thread.
#ifndef MLA_SERVER_METRICS_OPEN_METRICS_H_
#define MLA_SERVER_METRICS_OPEN_METRICS_H_

#include <prometheus/metric_family.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/metrics/histograms.h"

namespace mla::server {

inline constexpr char kOpenMetricsType[] =
    "application/openmetrics-text; version=1.0.0; charset=utf-8";
// Longest Accept header that is read; a longer one asks for nothing.
inline constexpr size_t kMaxAcceptBytes = 1024;

// Returns true if the Accept header prefers OpenMetrics, of a version up to 1.0.0, to plain text.
bool WantsOpenMetrics(absl::string_view accept);

// `exemplars` belong to buckets of histograms among `families`.
std::string OpenMetricsText(const std::vector<prometheus::MetricFamily>& families,
                            const std::vector<BucketExemplar>& exemplars);

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_OPEN_METRICS_H_
