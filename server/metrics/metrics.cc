#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/version/version.h"
#include "server/config/config.h"
#include "server/metrics/open_metrics.h"
#include "server/metrics/tenant_metrics.h"
#include "server/process/process_usage.h"
#include "server/tracing/tracer.h"

namespace mla::server {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;

constexpr size_t kMaxTenants = 64;

constexpr char kCounter[] = "counter", kGauge[] = "gauge", kHistogram[] = "histogram";

// Metrics that are counted as things happen or are not plain numbers; all others are rows of
// stats_table.cc. A metric's name appears here only.
constexpr MetricRow kDeclarations[] = {
    {"mla_requests_total", kCounter, "Requests answered, by tenant and canonical code."},
    {"mla_request_duration_seconds", kHistogram,
     "Arrival of a request to its answer, inside the server, by kind."},
    {"mla_request_queue_seconds", kHistogram, "Arrival of a request to its launch."},
    {"mla_admission_rejected_total", kCounter,
     "Requests refused before they were queued, by reason."},
    {"mla_launches_total", kCounter, "Launches of the backend, by what they carried."},
    {"mla_launch_duration_seconds", kHistogram,
     "Time of a launch by phase: schedule, plan, run, complete."},
    {"mla_launch_requests", kHistogram, "Requests that shared a launch."},
    {"mla_launch_layers", kHistogram, "Different layers in a launch."},
    {"mla_launch_sequences", kHistogram, "Sequences' row ranges in a launch."},
    {"mla_launch_clients", kHistogram, "Different streams in a launch."},
    {"mla_launch_rows", kHistogram, "Query rows of a launch, by stage."},
    {"mla_plan_imbalance_ratio", kHistogram, "Largest over mean work of a unit."},
    {"mla_partial_tiles", kHistogram, "Partial tiles of a launch, which are merged at its end."},
    {"mla_kv_page_group_lifetime_seconds", kHistogram,
     "How long page groups were in use, of every sixteenth that came back."},
    {"mla_sequence_rows", kHistogram, "Rows of sequences when they were closed."},
    {"mla_sequence_lifetime_seconds", kHistogram, "How long sequences were open."},
    {"mla_kv_usage_ratio", kGauge, "Used share of the page pool."},
    {"mla_tenants", kGauge, "Tenants that use something."},
    {"mla_tenant_used", kGauge, "Use of a tenant, by tenant and resource."},
    {"mla_tenant_bound", kGauge, "Bound of a tenant, by tenant and resource."},
    {"mla_bound_refusals_total", kCounter,
     "Takes that a bound refused, by resource and by whose bound: tenant or server. A stream that "
     "waits for staging memory counts at each try."},
    {"mla_staging_used_bytes", kGauge, "Staging memory in use, all tenants together."},
    {"mla_staging_bytes", kGauge, "Staging memory."},
    {"mla_kernel_errors_total", kCounter, "Launches that failed."},
    {"mla_device_memory_bytes", kGauge, "Memory taken at start, by use."},
    {"mla_tls_reloads_total", kCounter,
     "TLS files that had changed, by result: used, or refused because they cannot be used."},
    {"mla_tls_files_refused", kGauge,
     "1 while the TLS files on disk cannot be used and the last good ones are."},
    {"mla_tls_expiry_timestamp_seconds", kGauge,
     "When the TLS files in use expire, in seconds since 1970, by file: cert, client_ca, "
     "client_crl (its next update)."},
    {"mla_config_reloads_total", kCounter,
     "Changes of the configuration while serving, by result: used, or refused as a whole."},
    {"mla_config_refused", kGauge,
     "1 while the configuration on disk cannot be used and the last good one is."},
    {"mla_trace_spans_total", kCounter,
     "Spans of recorded steps and calls, by result: exported, or dropped because the queue was "
     "full "
     "or the export failed."},
    {"mla_traces_refused_total", kCounter,
     "Steps and calls that were to be recorded and were not, beyond the bounds of tracing.*."},
    {"mla_serving", kGauge,
     "1 while new work is taken, as health says; 0 while warming, draining or unhealthy."},
    {"mla_backend_info", kGauge, "1, with the backend in use as labels."},
    {"mla_gpu_unused", kGauge,
     "1 where this machine has GPUs that the server does not use and was not told to leave alone, "
     "by backend."},
    {"mla_build_info", kGauge,
     "1, with the version and the revision that it was built from as labels."},
    {"process_cpu_seconds_total", kCounter, "Processor time of the process."},
    {"process_resident_memory_bytes", kGauge, "Memory of the process that is in RAM."},
    {"process_virtual_memory_bytes", kGauge,
     "Address space of the process; the page pool of a host backend is reserved there at once."},
    {"process_open_fds", kGauge, "Open file descriptors of the process."},
    {"process_max_fds", kGauge, "Most file descriptors that the process may open."},
    {"process_threads", kGauge, "Threads of the process."},
    {"process_start_time_seconds", kGauge, "Start of the process, in seconds since 1970."},
};

const char* TypeOf(const Stat& stat) {
  return std::string_view(stat.metric).ends_with("_total") ? kCounter : kGauge;
}

std::string HelpOf(absl::string_view name) {
  for (const MetricRow& row : kDeclarations) {
    if (name == row.name) return std::string(row.help);
  }
  for (const Stat& stat : AllStats()) {
    if (stat.metric != nullptr && stat.help != nullptr && name == stat.metric) return stat.help;
  }
  __builtin_unreachable();
}

// Raises a counter to a total that is kept elsewhere.
void RaiseTo(Counter& counter, double total) {
  const double delta = total - counter.Value();
  if (delta > 0) counter.Increment(delta);
}

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();

  Family<Counter>& CounterFamily(const char* name) {
    return prometheus::BuildCounter().Name(name).Help(HelpOf(name)).Register(*registry);
  }
  Family<Gauge>& GaugeFamily(const char* name) {
    return prometheus::BuildGauge().Name(name).Help(HelpOf(name)).Register(*registry);
  }
  Counter& One(const char* name, const prometheus::Labels& labels = {}) {
    return CounterFamily(name).Add(labels);
  }
  Gauge& OneGauge(const char* name, const prometheus::Labels& labels = {}) {
    return GaugeFamily(name).Add(labels);
  }

  Family<Counter>& requests = CounterFamily("mla_requests_total");
  Family<Counter>& rejected = CounterFamily("mla_admission_rejected_total");
  // A counter of one atomic number, which each scrape shows.
  struct Total {
    Counter& shown;
    std::atomic<uint64_t> count{0};
  };
  Total launches_decode{One("mla_launches_total", {{"kind", "decode"}})};
  Total launches_prefill{One("mla_launches_total", {{"kind", "prefill"}})};
  Total launches_mixed{One("mla_launches_total", {{"kind", "mixed"}})};
  Histograms histograms;
  TenantMetrics tenant_metrics{{&GaugeFamily("mla_tenant_used"), &GaugeFamily("mla_tenant_bound"),
                                &CounterFamily("mla_bound_refusals_total"),
                                &OneGauge("mla_tenants"), &OneGauge("mla_staging_used_bytes"),
                                &OneGauge("mla_staging_bytes")}};
  Gauge& kv_usage = OneGauge("mla_kv_usage_ratio");
  Total kernel_errors{One("mla_kernel_errors_total")};
  Counter& tls_reloads = One("mla_tls_reloads_total", {{"result", "used"}});
  Counter& tls_refused = One("mla_tls_reloads_total", {{"result", "refused"}});
  Counter& config_reloads = One("mla_config_reloads_total", {{"result", "used"}});
  Counter& config_refused = One("mla_config_reloads_total", {{"result", "refused"}});
  Gauge& config_refused_now = OneGauge("mla_config_refused");
  Gauge& tls_files_refused = OneGauge("mla_tls_files_refused");
  Family<Gauge>& tls_expiry = GaugeFamily("mla_tls_expiry_timestamp_seconds");
  Counter& spans_exported = One("mla_trace_spans_total", {{"result", "exported"}});
  Counter& spans_dropped = One("mla_trace_spans_total", {{"result", "dropped"}});
  Counter& traces_refused = One("mla_traces_refused_total");
  Gauge& serving = OneGauge("mla_serving");
  Family<Gauge>& memory = GaugeFamily("mla_device_memory_bytes");
  Family<Gauge>& backend = GaugeFamily("mla_backend_info");
  Family<Gauge>& gpu_unused = GaugeFamily("mla_gpu_unused");
  Counter& cpu_seconds = One("process_cpu_seconds_total");
  Gauge& resident = OneGauge("process_resident_memory_bytes");
  Gauge& virtual_bytes = OneGauge("process_virtual_memory_bytes");
  Gauge& open_fds = OneGauge("process_open_fds");
  Gauge& max_fds = OneGauge("process_max_fds");
  Gauge& threads = OneGauge("process_threads");
  Gauge& start_time = OneGauge("process_start_time_seconds");
  Gauge& build =
      OneGauge("mla_build_info", {{"version", base::kVersion}, {"revision", base::Revision()}});

  // The metrics of stats_table.cc, which each scrape sets.
  struct Sampled {
    const Stat* stat;
    Counter* counter;  // null: a gauge
    Gauge* gauge;
  };
  std::vector<Sampled> sampled = Sample();

  std::vector<Sampled> Sample() {
    std::vector<Sampled> samples;
    for (const Stat& stat : AllStats()) {
      if (stat.metric == nullptr) continue;
      prometheus::Labels labels;
      if (stat.label != nullptr) labels[stat.label] = stat.label_value;
      const bool counts = TypeOf(stat) == kCounter;
      samples.push_back({&stat, counts ? &One(stat.metric, labels) : nullptr,
                         counts ? nullptr : &OneGauge(stat.metric, labels)});
    }
    return samples;
  }

  void ShowRequests(const std::string& name, const TenantCounters& tenant) {
    for (int code = 0; code < TenantCounters::kCodes; ++code) {
      const auto total = static_cast<double>(tenant.count(code));
      if (total == 0) continue;
      const std::string text = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
      RaiseTo(requests.Add({{"tenant", name}, {"code", text}}), total);
    }
  }

  Mutex mutex;  // guards tenants and scrapes
  std::map<std::string, std::unique_ptr<TenantCounters>> tenants ABSL_GUARDED_BY(mutex);
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) { impl_->build.Set(1); }
Metrics::~Metrics() = default;

void Metrics::OnLaunch(const scheduler::LaunchReport& report) {
  Impl& m = *impl_;
  const bool prefill = report.rows_extend + report.rows_prefill > 0;
  Impl::Total& kind = !prefill                 ? m.launches_decode
                      : report.rows_decode > 0 ? m.launches_mixed
                                               : m.launches_prefill;
  ++kind.count;
  if (!report.ok) ++m.kernel_errors.count;
  m.histograms.ObserveLaunch(report);
}

void Metrics::OnRequest(const scheduler::RequestReport& report) {
  impl_->histograms.ObserveRequest(report);
}

void Metrics::OnSequenceClosed(int64_t rows, int64_t open_ns) {
  impl_->histograms.ObserveSequence(rows, open_ns);
}

void Metrics::OnPageGroupFreed(int64_t held_ns) { impl_->histograms.ObservePageGroup(held_ns); }

TenantCounters* Metrics::ForTenant(const std::string& tenant) {
  const MutexLock lock(impl_->mutex);
  auto& tenants = impl_->tenants;
  auto found = tenants.find(tenant);
  const std::string name =
      found != tenants.end() || tenants.size() < kMaxTenants ? tenant : "other";
  auto& slot = tenants[name];
  if (slot == nullptr) slot = std::make_unique<TenantCounters>();
  return slot.get();
}

void Metrics::CountRejected(const std::string& reason) {
  impl_->rejected.Add({{"reason", reason}}).Increment();
}

void Metrics::SetBackend(const kernels::BackendInfo& info, int64_t kv_bytes, int64_t total_bytes) {
  impl_->backend.Add({{"name", info.name}, {"arch", info.arch}, {"device", info.device}}).Set(1);
  impl_->memory.Add({{"use", "kv"}}).Set(static_cast<double>(kv_bytes));
  impl_->memory.Add({{"use", "workspace"}}).Set(static_cast<double>(total_bytes - kv_bytes));
}

void Metrics::SetCandidates(std::span<const kernels::BackendCandidate> candidates) {
  for (const kernels::BackendCandidate& candidate : candidates) {
    impl_->gpu_unused.Add({{"backend", candidate.name}})
        .Set(candidate.unused_hardware.empty() ? 0 : 1);
  }
}

void Metrics::SetTenants(std::shared_ptr<const scheduler::TenantTable> tenants, int32_t most) {
  const MutexLock lock(impl_->mutex);
  impl_->tenant_metrics.Watch(std::move(tenants), most);
}

void Metrics::SetServing(bool serving) { impl_->serving.Set(serving ? 1 : 0); }

void Metrics::SetConfig(const ReloadStats& status) {
  Impl& m = *impl_;
  const MutexLock lock(m.mutex);
  RaiseTo(m.config_reloads, static_cast<double>(status.reloads));
  RaiseTo(m.config_refused, static_cast<double>(status.refused));
  m.config_refused_now.Set(status.why.empty() ? 0 : 1);
}

void Metrics::SetTls(const ReloadStats& status, const std::map<std::string, int64_t>& expires) {
  Impl& m = *impl_;
  const MutexLock lock(m.mutex);
  RaiseTo(m.tls_reloads, static_cast<double>(status.reloads));
  RaiseTo(m.tls_refused, static_cast<double>(status.refused));
  m.tls_files_refused.Set(status.why.empty() ? 0 : 1);
  for (const auto& [file, seconds] : expires) {
    if (seconds != 0) m.tls_expiry.Add({{"file", file}}).Set(static_cast<double>(seconds));
  }
}

void Metrics::SetTraces(const TracerStats& stats) {
  const MutexLock lock(impl_->mutex);
  RaiseTo(impl_->spans_exported, static_cast<double>(stats.exported));
  RaiseTo(impl_->spans_dropped, static_cast<double>(stats.dropped));
  RaiseTo(impl_->traces_refused, static_cast<double>(stats.refused));
}

std::vector<TenantTotals> Metrics::Tenants() const {
  const MutexLock lock(impl_->mutex);
  std::vector<TenantTotals> all;
  for (const auto& [name, tenant] : impl_->tenants) {
    TenantTotals& totals = all.emplace_back(TenantTotals{.name = name});
    for (int code = 0; code < TenantCounters::kCodes; ++code) {
      (code == 0 ? totals.ok : totals.failed) += tenant->count(code);
    }
  }
  return all;
}

Distribution Metrics::AttendTimes() const { return impl_->histograms.AttendTimes(); }

Distribution Metrics::QueueTimes() const { return impl_->histograms.QueueTimes(); }

void Metrics::ShowTrace(scheduler::RequestKind kind, int64_t total_ns, int64_t queue_ns,
                        const std::string& trace_id) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  impl_->histograms.ShowTrace(kind, total_ns, queue_ns, trace_id,
                              std::chrono::duration<double>(now).count());
}

std::string Metrics::Expose(const scheduler::EngineStats& stats, bool open_metrics) {
  Impl& m = *impl_;
  const MutexLock lock(m.mutex);
  const auto count = [](auto value) { return static_cast<double>(value); };
  for (const Impl::Sampled& sampled : m.sampled) {
    const double value =
        count(sampled.stat->read({stats, wire_, checkpoints_, hand_overs_})) * sampled.stat->unit;
    if (sampled.counter != nullptr) RaiseTo(*sampled.counter, value);
    if (sampled.gauge != nullptr) sampled.gauge->Set(value);
  }
  m.kv_usage.Set(stats.kv_bytes_total > 0 ? count(stats.kv_bytes_used) / count(stats.kv_bytes_total)
                                          : 0);
  for (const Impl::Total* total :
       {&m.launches_decode, &m.launches_prefill, &m.launches_mixed, &m.kernel_errors}) {
    RaiseTo(total->shown, count(total->count.load()));
  }
  for (const auto& [name, tenant] : m.tenants) m.ShowRequests(name, *tenant);
  m.tenant_metrics.Update();
  const ProcessUsage usage = ReadProcessUsage();
  RaiseTo(m.cpu_seconds, usage.cpu_seconds);
  m.resident.Set(count(usage.resident_bytes));
  m.virtual_bytes.Set(count(usage.virtual_bytes));
  m.open_fds.Set(count(usage.open_fds));
  m.max_fds.Set(count(usage.max_fds));
  m.threads.Set(count(usage.threads));
  m.start_time.Set(usage.start_time_seconds);
  std::vector<prometheus::MetricFamily> families = m.registry->Collect();
  const auto own = static_cast<std::ptrdiff_t>(families.size());
  m.histograms.Collect(&families);
  std::for_each(families.begin() + own, families.end(),
                [](prometheus::MetricFamily& family) { family.help = HelpOf(family.name); });
  if (open_metrics) return OpenMetricsText(families, m.histograms.Exemplars());
  return prometheus::TextSerializer().Serialize(families);
}

std::vector<MetricRow> Metrics::Declared() {
  std::vector<MetricRow> rows(std::begin(kDeclarations), std::end(kDeclarations));
  for (const Stat& stat : AllStats()) {
    if (stat.metric != nullptr && stat.help != nullptr) {
      rows.push_back({stat.metric, TypeOf(stat), stat.help});
    }
  }
  std::sort(rows.begin(), rows.end(),
            [](const MetricRow& a, const MetricRow& b) { return a.name < b.name; });
  return rows;
}

}  // namespace mla::server
