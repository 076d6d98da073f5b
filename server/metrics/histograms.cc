#include "server/metrics/histograms.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <array>
#include <limits>
#include <string_view>

namespace mla::server {
namespace {

using scheduler::RequestKind;

std::vector<double> Powers(double first, double factor, int count) {
  std::vector<double> bounds;
  for (int i = 0; i < count; ++i, first *= factor) bounds.push_back(first);
  return bounds;
}

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

prometheus::ClientMetric MetricOf(const Histogram& histogram) {
  const Distribution distribution = histogram.Get();
  prometheus::ClientMetric metric;
  if (const auto& [name, value] = histogram.label(); !name.empty()) {
    metric.label.push_back({name, value});
  }
  metric.histogram.sample_count = distribution.counts.back();
  metric.histogram.sample_sum = histogram.sum();
  for (size_t i = 0; i < distribution.counts.size(); ++i) {
    const double bound = i < distribution.bounds.size() ? distribution.bounds[i]
                                                        : std::numeric_limits<double>::infinity();
    metric.histogram.bucket.push_back({distribution.counts[i], bound});
  }
  return metric;
}

}  // namespace

Distribution Histogram::Get() const {
  Distribution distribution{bounds_, {}};
  uint64_t sum = 0;
  for (const uint64_t count : counts_) distribution.counts.push_back(sum += count);
  return distribution;
}

// Histograms of one name must follow one another.
struct Histograms::All {
  const std::vector<double> times = Powers(1e-5, 2, 22);
  const std::vector<double> lifetimes = Powers(1e-3, 4, 14);
  const std::vector<double> lengths = Powers(1, 2, 21);
  const std::vector<double> counts = Powers(1, 2, 13);
  const std::vector<double> ratios = {1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4};
  std::array<Histogram, 4> durations = {  // by kind of request
      Histogram("mla_request_duration_seconds", times, {"kind", "begin_step"}),
      Histogram("mla_request_duration_seconds", times, {"kind", "attend"}),
      Histogram("mla_request_duration_seconds", times, {"kind", "end_step"}),
      Histogram("mla_request_duration_seconds", times, {"kind", "abort_step"})};
  Histogram queue{"mla_request_queue_seconds", times};
  Histogram schedule{"mla_launch_duration_seconds", times, {"phase", "schedule"}};
  Histogram plan{"mla_launch_duration_seconds", times, {"phase", "plan"}};
  Histogram run{"mla_launch_duration_seconds", times, {"phase", "run"}};
  Histogram complete{"mla_launch_duration_seconds", times, {"phase", "complete"}};
  Histogram requests{"mla_launch_requests", counts};
  Histogram layers{"mla_launch_layers", counts};
  Histogram records{"mla_launch_sequences", counts};
  Histogram clients{"mla_launch_clients", counts};
  Histogram decode{"mla_launch_rows", counts, {"stage", "decode"}};
  Histogram extend{"mla_launch_rows", counts, {"stage", "extend"}};
  Histogram prefill{"mla_launch_rows", counts, {"stage", "prefill"}};
  Histogram imbalance{"mla_plan_imbalance_ratio", ratios};
  Histogram partials{"mla_partial_tiles", counts};
  Histogram page_lifetime{"mla_kv_page_group_lifetime_seconds", lifetimes};
  Histogram sequence_rows{"mla_sequence_rows", lengths};
  Histogram sequence_lifetime{"mla_sequence_lifetime_seconds", lifetimes};

  Histogram& duration(RequestKind kind) { return durations[static_cast<size_t>(kind)]; }
  template <typename Visit>
  void ForEach(Visit&& visit) const {
    for (const Histogram& duration : durations) visit(duration);
    for (const Histogram* histogram :
         {&queue, &schedule, &plan, &run, &complete, &requests, &layers, &records, &clients,
          &decode, &extend, &prefill, &imbalance, &partials, &page_lifetime, &sequence_rows,
          &sequence_lifetime}) {
      visit(*histogram);
    }
  }
};

Histograms::Histograms() : all_(std::make_unique<All>()) {}
Histograms::~Histograms() = default;

void Histograms::ObserveLaunch(const scheduler::LaunchReport& report) {
  const MutexLock lock(mutex_);
  All& all = *all_;
  all.schedule.Observe(Seconds(report.schedule_ns));
  all.plan.Observe(Seconds(report.plan_ns));
  all.run.Observe(Seconds(report.kernel_ns));
  all.complete.Observe(Seconds(report.complete_ns));
  all.requests.Observe(report.requests);
  all.records.Observe(report.records);
  all.layers.Observe(report.layers);
  all.clients.Observe(report.clients);
  if (report.rows_decode > 0) all.decode.Observe(report.rows_decode);
  if (report.rows_extend > 0) all.extend.Observe(report.rows_extend);
  if (report.rows_prefill > 0) all.prefill.Observe(report.rows_prefill);
  all.imbalance.Observe(report.imbalance);
  all.partials.Observe(report.partials);
}

void Histograms::ObserveRequest(const scheduler::RequestReport& report) {
  const MutexLock lock(mutex_);
  all_->duration(report.kind).Observe(Seconds(report.total_ns));
  if (report.kind == RequestKind::kAttend && report.ok) {
    all_->queue.Observe(Seconds(report.queue_ns));
  }
}

void Histograms::ObserveSequence(int64_t rows, int64_t open_ns) {
  const MutexLock lock(mutex_);
  all_->sequence_rows.Observe(static_cast<double>(rows));
  all_->sequence_lifetime.Observe(Seconds(open_ns));
}

void Histograms::ObservePageGroup(int64_t held_ns) {
  const MutexLock lock(mutex_);
  all_->page_lifetime.Observe(Seconds(held_ns));
}

void Histograms::ShowTrace(RequestKind kind, int64_t total_ns, int64_t queue_ns,
                           const std::string& trace_id, double unix_seconds) {
  const MutexLock lock(mutex_);
  all_->duration(kind).Show({Seconds(total_ns), trace_id, unix_seconds});
  if (queue_ns >= 0) all_->queue.Show({Seconds(queue_ns), trace_id, unix_seconds});
}

std::vector<BucketExemplar> Histograms::Exemplars() const {
  const MutexLock lock(mutex_);
  std::vector<BucketExemplar> all;
  all_->ForEach([&all](const Histogram& histogram) {
    const std::vector<Exemplar>& exemplars = histogram.exemplars();
    for (size_t i = 0; i < exemplars.size(); ++i) {
      if (exemplars[i].trace_id.empty()) continue;
      all.push_back({histogram.name(), histogram.label().second, i, exemplars[i]});
    }
  });
  return all;
}

Distribution Histograms::AttendTimes() const {
  const MutexLock lock(mutex_);
  return all_->duration(RequestKind::kAttend).Get();
}

Distribution Histograms::QueueTimes() const {
  const MutexLock lock(mutex_);
  return all_->queue.Get();
}

void Histograms::Collect(std::vector<prometheus::MetricFamily>* families) const {
  const MutexLock lock(mutex_);
  all_->ForEach([families](const Histogram& histogram) {
    if (families->empty() || families->back().name != histogram.name()) {
      families->push_back({histogram.name(), "", prometheus::MetricType::Histogram, {}});
    }
    families->back().metric.push_back(MetricOf(histogram));
  });
}

}  // namespace mla::server
