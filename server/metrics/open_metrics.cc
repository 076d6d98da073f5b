#include "server/metrics/open_metrics.h"

#include <prometheus/client_metric.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace mla::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr char kTotal[] = "_total";

// Returns the shortest text that reads back as the number. As the specification's canonical numbers
// are written: "1.0", "0.25", "1e-05", "1.048576e+06".
std::string Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  const double size = std::abs(value);
  const bool scientific = size != 0 && (size < 1e-4 || size >= 1e6);
  char text[512];
  const auto end =
      std::to_chars(text, text + sizeof(text), value,
                    scientific ? std::chars_format::scientific : std::chars_format::fixed);
  std::string number(text, end.ptr);
  if (!scientific && !absl::StrContains(number, '.')) number += ".0";
  return number;
}

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\n", "\\n"}, {"\"", "\\\""}});
}

// "{a="b",le="0.5"}"; empty without labels. `le` may be empty.
std::string Labels(const ClientMetric& metric, const std::string& le = "") {
  std::string text;
  for (const ClientMetric::Label& label : metric.label) {
    absl::StrAppend(&text, text.empty() ? "" : ",", label.name, "=\"", Escaped(label.value), "\"");
  }
  if (!le.empty()) absl::StrAppend(&text, text.empty() ? "" : ",", "le=\"", le, "\"");
  return text.empty() ? text : absl::StrCat("{", text, "}");
}

// Maps a family, the value of the histogram's label, and a bucket to an exemplar.
using ExemplarMap = std::map<std::tuple<std::string, std::string, size_t>, const Exemplar*>;

std::string TextOf(const Exemplar& exemplar) {
  return absl::StrCat(" # {trace_id=\"", exemplar.trace_id, "\"} ", Number(exemplar.value), " ",
                      absl::StrFormat("%.3f", exemplar.unix_seconds));
}

void AddHistogram(const std::string& name, const ClientMetric& metric, const ExemplarMap& exemplars,
                  std::string* out) {
  const std::string label = metric.label.empty() ? "" : metric.label.front().value;
  const auto& buckets = metric.histogram.bucket;
  for (size_t i = 0; i < buckets.size(); ++i) {
    absl::StrAppend(out, name, "_bucket", Labels(metric, Number(buckets[i].upper_bound)), " ",
                    buckets[i].cumulative_count);
    const auto found = exemplars.find({name, label, i});
    if (found != exemplars.end()) absl::StrAppend(out, TextOf(*found->second));
    absl::StrAppend(out, "\n");
  }
  absl::StrAppend(out, name, "_count", Labels(metric), " ", metric.histogram.sample_count, "\n",
                  name, "_sum", Labels(metric), " ", Number(metric.histogram.sample_sum), "\n");
}

const char* TypeOf(MetricType type) {
  switch (type) {
    case MetricType::Counter:
      return "counter";
    case MetricType::Histogram:
      return "histogram";
    default:
      return "gauge";  // this server has no others
  }
}

// Returns the quality that the header gives a media type, 0 if it is not accepted. Only the type
// itself counts for OpenMetrics: scrapers that send "*/*" expect plain text.
double QualityOf(absl::string_view range, absl::string_view type) {
  const std::vector<absl::string_view> parts = absl::StrSplit(range, ';');
  if (!absl::EqualsIgnoreCase(absl::StripAsciiWhitespace(parts.front()), type)) return 0;
  double quality = 1;
  for (size_t i = 1; i < parts.size(); ++i) {
    const absl::string_view part = absl::StripAsciiWhitespace(parts[i]);
    if (absl::StartsWith(part, "q=") && !absl::SimpleAtod(part.substr(2), &quality)) return 0;
    if (absl::StartsWith(part, "version=") && part != "version=1.0.0" && part != "version=0.0.1" &&
        type != "text/plain") {
      return 0;
    }
  }
  return quality;
}

}  // namespace

bool WantsOpenMetrics(absl::string_view accept) {
  if (accept.size() > kMaxAcceptBytes) return false;
  double open = 0, plain = 0;
  for (const absl::string_view range : absl::StrSplit(accept, ',')) {
    open = std::max(open, QualityOf(range, "application/openmetrics-text"));
    plain = std::max(plain, QualityOf(range, "text/plain"));
  }
  return open > 0 && open >= plain;
}

std::string OpenMetricsText(const std::vector<MetricFamily>& families,
                            const std::vector<BucketExemplar>& exemplars) {
  ExemplarMap by_bucket;
  for (const BucketExemplar& one : exemplars) {
    by_bucket[{one.family, one.label, one.bucket}] = &one.exemplar;
  }
  std::string out;
  for (const MetricFamily& family : families) {
    // A counter's family has the name without the suffix of its samples.
    absl::string_view name = family.name;
    const bool counter = family.type == MetricType::Counter;
    if (counter && absl::EndsWith(name, kTotal)) name.remove_suffix(sizeof(kTotal) - 1);
    absl::StrAppend(&out, "# TYPE ", name, " ", TypeOf(family.type), "\n", "# HELP ", name, " ",
                    Escaped(family.help), "\n");
    for (const ClientMetric& metric : family.metric) {
      if (family.type == MetricType::Histogram) {
        AddHistogram(family.name, metric, by_bucket, &out);
        continue;
      }
      absl::StrAppend(&out, name, counter ? kTotal : "", Labels(metric), " ",
                      Number(counter ? metric.counter.value : metric.gauge.value), "\n");
    }
  }
  return out + "# EOF\n";
}

}  // namespace mla::server
