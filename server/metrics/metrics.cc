#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/grpc/grpc_status.h"
#include "server/metrics/tenant_metrics.h"
#include "server/process/process_usage.h"
#include "server/process/version.h"

namespace mla::server {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr size_t kMaxTenants = 64;
constexpr int kCodes = 17;

enum class Type { kCounter, kGauge, kHistogram };

struct Declaration {
  const char* name;
  Type type;
  const char* help;
};

// The declaration of every metric. A name is used nowhere else in the product.
constexpr Declaration kDeclarations[] = {
    {"mla_requests_total", Type::kCounter, "Requests answered, by tenant and canonical code."},
    {"mla_request_duration_seconds", Type::kHistogram,
     "Arrival of a request to its answer, inside the server, by kind."},
    {"mla_request_queue_seconds", Type::kHistogram, "Arrival of a request to its launch."},
    {"mla_requests_waiting", Type::kGauge, "Requests accepted whose launch has not started."},
    {"mla_oldest_waiting_seconds", Type::kGauge,
     "Since the arrival of the oldest request that waits, by stage."},
    {"mla_requests_running", Type::kGauge, "Requests in the running launch."},
    {"mla_admission_rejected_total", Type::kCounter,
     "Requests refused before they were queued, by reason."},
    {"mla_launches_total", Type::kCounter, "Launches of the backend, by what they carried."},
    {"mla_launch_duration_seconds", Type::kHistogram,
     "Time of a launch by phase: schedule, plan, run, complete."},
    {"mla_launch_requests", Type::kHistogram, "Requests that shared a launch."},
    {"mla_launch_layers", Type::kHistogram, "Different layers in a launch."},
    {"mla_launch_sequences", Type::kHistogram, "Sequences' row ranges in a launch."},
    {"mla_launch_clients", Type::kHistogram, "Different streams in a launch."},
    {"mla_launch_rows", Type::kHistogram, "Query rows of a launch, by stage."},
    {"mla_rows_total", Type::kCounter, "Query rows computed, by stage."},
    {"mla_plan_imbalance_ratio", Type::kHistogram, "Largest over mean work of a unit."},
    {"mla_plan_reuse_total", Type::kCounter, "Launches by whether their plan was reused."},
    {"mla_partial_tiles", Type::kHistogram, "Partial tiles of a launch that Combine merges."},
    {"mla_slices_fused_total", Type::kCounter,
     "Head slices of tensor-parallel ranks computed as one with their siblings."},
    {"mla_slice_waits_expired_total", Type::kCounter,
     "Times that head slices were computed without a sibling that had not come in time."},
    {"mla_slice_waits_skipped_total", Type::kCounter,
     "Times that head slices did not wait for a sibling that had missed an earlier wait."},
    {"mla_open_steps", Type::kGauge, "Steps that clients have begun and not ended."},
    {"mla_open_steps_aborted_total", Type::kCounter, "Client steps dropped instead of committed."},
    {"mla_leases_active", Type::kGauge, "Open sequences; each holds a lease."},
    {"mla_leases_expired_total", Type::kCounter, "Leases that ran out: vanished workers."},
    {"mla_models", Type::kGauge, "Registered models."},
    {"mla_kv_page_groups_used", Type::kGauge, "Page groups in use."},
    {"mla_kv_page_groups_free", Type::kGauge, "Page groups free in existing slabs."},
    {"mla_kv_page_groups_shared", Type::kGauge, "Page groups held by more than one sequence."},
    {"mla_kv_page_groups_scrubbed_total", Type::kCounter, "Page groups zeroed between tenants."},
    {"mla_kv_copies_on_write_total", Type::kCounter, "Page groups copied for a forked sequence."},
    {"mla_kv_page_group_allocations_total", Type::kCounter, "Page groups handed out."},
    {"mla_kv_page_group_releases_total", Type::kCounter, "Page groups that came back, by reason."},
    {"mla_kv_page_group_lifetime_seconds", Type::kHistogram,
     "How long page groups were in use, of every sixteenth that came back."},
    {"mla_kv_read_bytes_total", Type::kCounter, "Bytes of KV rows that launches attended to."},
    {"mla_sequence_rows", Type::kHistogram, "Rows of sequences when they were closed."},
    {"mla_sequence_lifetime_seconds", Type::kHistogram, "How long sequences were open."},
    {"mla_kv_used_bytes", Type::kGauge, "Bytes of the page pool in use."},
    {"mla_kv_usage_ratio", Type::kGauge, "Used share of the page pool."},
    {"mla_streams_open", Type::kGauge, "Open Attend streams."},
    {"mla_shared_regions", Type::kGauge, "Shared-memory regions of connected clients."},
    {"mla_rings_open", Type::kGauge, "Command rings of connected clients."},
    {"mla_connections_refused_total", Type::kCounter,
     "Connections for gRPC that were closed at once: a bound was reached, or descriptors ran out."},
    {"mla_shm_connections_displaced_total", Type::kCounter,
     "Connections to the shared-memory socket that had sent no request and made room for others."},
    {"mla_shm_connections_refused_total", Type::kCounter,
     "Times that the server had no descriptor for a connection to the shared-memory socket."},
    {"mla_streams_disconnected_total", Type::kCounter,
     "Streams cut: slow readers, rings and regions whose client broke a rule."},
    {"mla_stream_write_blocked_seconds_total", Type::kCounter,
     "Time replies waited for the transport to take them."},
    {"mla_tenants", Type::kGauge, "Tenants that use something."},
    {"mla_tenant_used", Type::kGauge, "What a tenant uses, by tenant and resource."},
    {"mla_tenant_bound", Type::kGauge, "What a tenant may use, by tenant and resource."},
    {"mla_bound_refusals_total", Type::kCounter,
     "Takes that a bound refused, by resource and by whose bound: tenant or server."},
    {"mla_staging_used_bytes", Type::kGauge, "Staging memory in use, all tenants together."},
    {"mla_staging_bytes", Type::kGauge, "Staging memory."},
    {"mla_models_expired_total", Type::kCounter, "Models whose lease ran out."},
    {"mla_received_bytes_total", Type::kCounter, "Message bytes received, by path."},
    {"mla_sent_bytes_total", Type::kCounter, "Message bytes sent, by path."},
    {"mla_copied_bytes_total", Type::kCounter, "Payload bytes copied on the host, by path."},
    {"mla_kernel_errors_total", Type::kCounter, "Launches that failed."},
    {"mla_device_memory_bytes", Type::kGauge, "Memory taken at start, by use."},
    {"mla_tls_reloads_total", Type::kCounter,
     "TLS files that had changed, by whether they were taken into use."},
    {"mla_tls_files_refused", Type::kGauge,
     "1 while the TLS files on disk cannot be used and the last good ones are."},
    {"mla_tls_expiry_timestamp_seconds", Type::kGauge,
     "When the TLS files in use expire, in seconds since 1970, by file."},
    {"mla_serving", Type::kGauge, "1 while new work is taken, as health says; else 0."},
    {"mla_backend_info", Type::kGauge, "1, with the backend in use as labels."},
    {"mla_build_info", Type::kGauge, "1, with the version as label."},
    {"process_cpu_seconds_total", Type::kCounter, "Processor time of the process."},
    {"process_resident_memory_bytes", Type::kGauge, "Memory of the process that is in RAM."},
    {"process_virtual_memory_bytes", Type::kGauge, "Address space of the process."},
    {"process_open_fds", Type::kGauge, "Open file descriptors of the process."},
    {"process_max_fds", Type::kGauge, "Most file descriptors that the process may open."},
    {"process_threads", Type::kGauge, "Threads of the process."},
    {"process_start_time_seconds", Type::kGauge, "Start of the process, in seconds since 1970."},
};

const Declaration& Find(const char* name) {
  for (const Declaration& declaration : kDeclarations) {
    if (std::string(name) == declaration.name) return declaration;
  }
  __builtin_unreachable();
}

Histogram::BucketBoundaries Powers(double first, double factor, int count) {
  Histogram::BucketBoundaries bounds;
  for (int i = 0; i < count; ++i, first *= factor) bounds.push_back(first);
  return bounds;
}

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Brings a counter up to a total kept elsewhere.
void RaiseTo(Counter& counter, double total) {
  const double delta = total - counter.Value();
  if (delta > 0) counter.Increment(delta);
}

Distribution DistributionOf(const Histogram& histogram) {
  const prometheus::ClientMetric metric = histogram.Collect();
  Distribution distribution;
  for (const auto& bucket : metric.histogram.bucket) {
    if (std::isfinite(bucket.upper_bound)) distribution.bounds.push_back(bucket.upper_bound);
    distribution.counts.push_back(bucket.cumulative_count);
  }
  return distribution;
}

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();

  Family<Counter>& CounterFamily(const char* name) {
    return prometheus::BuildCounter().Name(name).Help(Find(name).help).Register(*registry);
  }
  Family<Gauge>& GaugeFamily(const char* name) {
    return prometheus::BuildGauge().Name(name).Help(Find(name).help).Register(*registry);
  }
  Family<Histogram>& HistogramFamily(const char* name) {
    return prometheus::BuildHistogram().Name(name).Help(Find(name).help).Register(*registry);
  }
  Counter& One(const char* name, const prometheus::Labels& labels = {}) {
    return CounterFamily(name).Add(labels);
  }
  Gauge& OneGauge(const char* name, const prometheus::Labels& labels = {}) {
    return GaugeFamily(name).Add(labels);
  }
  Histogram& OneHistogram(const char* name, const Histogram::BucketBoundaries& bounds,
                          const prometheus::Labels& labels = {}) {
    return HistogramFamily(name).Add(labels, bounds);
  }

  const Histogram::BucketBoundaries times = Powers(1e-5, 2, 22);
  const Histogram::BucketBoundaries lifetimes = Powers(1e-3, 4, 14);
  const Histogram::BucketBoundaries lengths = Powers(1, 2, 21);
  const Histogram::BucketBoundaries counts = Powers(1, 2, 13);
  const Histogram::BucketBoundaries ratios = {1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4};

  Family<Counter>& requests = CounterFamily("mla_requests_total");
  Family<Counter>& rejected = CounterFamily("mla_admission_rejected_total");
  std::array<Histogram*, 4> request_duration = {
      &OneHistogram("mla_request_duration_seconds", times, {{"kind", "begin_step"}}),
      &OneHistogram("mla_request_duration_seconds", times, {{"kind", "attend"}}),
      &OneHistogram("mla_request_duration_seconds", times, {{"kind", "end_step"}}),
      &OneHistogram("mla_request_duration_seconds", times, {{"kind", "abort_step"}})};
  Histogram& request_queue = OneHistogram("mla_request_queue_seconds", times);
  Gauge& waiting = OneGauge("mla_requests_waiting");
  Gauge& running = OneGauge("mla_requests_running");
  std::array<Gauge*, 4> oldest_waiting = {
      &OneGauge("mla_oldest_waiting_seconds", {{"stage", "decode"}}),
      &OneGauge("mla_oldest_waiting_seconds", {{"stage", "extend"}}),
      &OneGauge("mla_oldest_waiting_seconds", {{"stage", "prefill"}}),
      &OneGauge("mla_oldest_waiting_seconds", {{"stage", "kv_rows"}})};
  Counter& launches_decode = One("mla_launches_total", {{"kind", "decode"}});
  Counter& launches_prefill = One("mla_launches_total", {{"kind", "prefill"}});
  Counter& launches_mixed = One("mla_launches_total", {{"kind", "mixed"}});
  Histogram& phase_schedule =
      OneHistogram("mla_launch_duration_seconds", times, {{"phase", "schedule"}});
  Histogram& phase_plan = OneHistogram("mla_launch_duration_seconds", times, {{"phase", "plan"}});
  Histogram& phase_run = OneHistogram("mla_launch_duration_seconds", times, {{"phase", "run"}});
  Histogram& phase_complete =
      OneHistogram("mla_launch_duration_seconds", times, {{"phase", "complete"}});
  Histogram& launch_requests = OneHistogram("mla_launch_requests", counts);
  Histogram& launch_layers = OneHistogram("mla_launch_layers", counts);
  Histogram& launch_records = OneHistogram("mla_launch_sequences", counts);
  Histogram& launch_clients = OneHistogram("mla_launch_clients", counts);
  Histogram& rows_decode = OneHistogram("mla_launch_rows", counts, {{"stage", "decode"}});
  Histogram& rows_extend = OneHistogram("mla_launch_rows", counts, {{"stage", "extend"}});
  Histogram& rows_prefill = OneHistogram("mla_launch_rows", counts, {{"stage", "prefill"}});
  Counter& total_decode = One("mla_rows_total", {{"stage", "decode"}});
  Counter& total_extend = One("mla_rows_total", {{"stage", "extend"}});
  Counter& total_prefill = One("mla_rows_total", {{"stage", "prefill"}});
  Histogram& imbalance = OneHistogram("mla_plan_imbalance_ratio", ratios);
  Counter& plan_hit = One("mla_plan_reuse_total", {{"result", "hit"}});
  Counter& plan_miss = One("mla_plan_reuse_total", {{"result", "miss"}});
  Histogram& partials = OneHistogram("mla_partial_tiles", counts);
  Counter& slices_fused = One("mla_slices_fused_total");
  Counter& slice_waits_expired = One("mla_slice_waits_expired_total");
  Counter& slice_waits_skipped = One("mla_slice_waits_skipped_total");
  Gauge& steps_open = OneGauge("mla_open_steps");
  Counter& steps_aborted = One("mla_open_steps_aborted_total");
  Gauge& sequences = OneGauge("mla_leases_active");
  Counter& leases_expired = One("mla_leases_expired_total");
  Counter& models_expired = One("mla_models_expired_total");
  TenantMetrics tenant_metrics{{&GaugeFamily("mla_tenant_used"), &GaugeFamily("mla_tenant_bound"),
                                &CounterFamily("mla_bound_refusals_total"),
                                &OneGauge("mla_tenants"), &OneGauge("mla_staging_used_bytes"),
                                &OneGauge("mla_staging_bytes")}};
  Gauge& models = OneGauge("mla_models");
  Gauge& pages_used = OneGauge("mla_kv_page_groups_used");
  Gauge& pages_free = OneGauge("mla_kv_page_groups_free");
  Gauge& pages_shared = OneGauge("mla_kv_page_groups_shared");
  Counter& pages_scrubbed = One("mla_kv_page_groups_scrubbed_total");
  Counter& copies_on_write = One("mla_kv_copies_on_write_total");
  Counter& pages_taken = One("mla_kv_page_group_allocations_total");
  Counter& pages_released = One("mla_kv_page_group_releases_total", {{"reason", "released"}});
  Counter& pages_expired = One("mla_kv_page_group_releases_total", {{"reason", "lease_expired"}});
  Counter& pages_truncated = One("mla_kv_page_group_releases_total", {{"reason", "truncated"}});
  Counter& pages_uncommitted = One("mla_kv_page_group_releases_total", {{"reason", "uncommitted"}});
  Histogram& page_lifetime = OneHistogram("mla_kv_page_group_lifetime_seconds", lifetimes);
  Counter& kv_read = One("mla_kv_read_bytes_total");
  Histogram& sequence_rows = OneHistogram("mla_sequence_rows", lengths);
  Histogram& sequence_lifetime = OneHistogram("mla_sequence_lifetime_seconds", lifetimes);
  Gauge& kv_used = OneGauge("mla_kv_used_bytes");
  Gauge& kv_usage = OneGauge("mla_kv_usage_ratio");
  Gauge& streams = OneGauge("mla_streams_open");
  Gauge& shared_regions = OneGauge("mla_shared_regions");
  Gauge& rings = OneGauge("mla_rings_open");
  Counter& streams_disconnected =
      One("mla_streams_disconnected_total", {{"reason", "slow_reader"}});
  Counter& rings_disconnected = One("mla_streams_disconnected_total", {{"reason", "ring_rules"}});
  Counter& regions_disconnected =
      One("mla_streams_disconnected_total", {{"reason", "region_holes"}});
  Counter& connections_refused = One("mla_connections_refused_total");
  Counter& shm_displaced = One("mla_shm_connections_displaced_total");
  Counter& shm_refusals = One("mla_shm_connections_refused_total");
  Counter& write_blocked = One("mla_stream_write_blocked_seconds_total");
  Counter& received = One("mla_received_bytes_total", {{"path", "inline"}});
  Counter& sent = One("mla_sent_bytes_total", {{"path", "inline"}});
  Counter& shared_received = One("mla_received_bytes_total", {{"path", "shared"}});
  Counter& shared_sent = One("mla_sent_bytes_total", {{"path", "shared"}});
  Counter& copied = One("mla_copied_bytes_total", {{"path", "inline"}});
  Counter& kernel_errors = One("mla_kernel_errors_total");
  Counter& tls_reloads = One("mla_tls_reloads_total", {{"result", "used"}});
  Counter& tls_refused = One("mla_tls_reloads_total", {{"result", "refused"}});
  Gauge& tls_files_refused = OneGauge("mla_tls_files_refused");
  Family<Gauge>& tls_expiry = GaugeFamily("mla_tls_expiry_timestamp_seconds");
  Gauge& serving = OneGauge("mla_serving");
  Family<Gauge>& memory = GaugeFamily("mla_device_memory_bytes");
  Family<Gauge>& backend = GaugeFamily("mla_backend_info");
  Counter& cpu_seconds = One("process_cpu_seconds_total");
  Gauge& resident = OneGauge("process_resident_memory_bytes");
  Gauge& virtual_bytes = OneGauge("process_virtual_memory_bytes");
  Gauge& open_fds = OneGauge("process_open_fds");
  Gauge& max_fds = OneGauge("process_max_fds");
  Gauge& threads = OneGauge("process_threads");
  Gauge& start_time = OneGauge("process_start_time_seconds");
  Gauge& build = OneGauge("mla_build_info", {{"version", kVersion}});

  class Tenant final : public TenantCounters {
   public:
    Tenant(Family<Counter>* family, std::string name) : family_(family), name_(std::move(name)) {}
    void Count(absl::StatusCode code) override {
      const int index = std::clamp(static_cast<int>(code), 0, kCodes - 1);
      Counter* counter = counters_[index].load(std::memory_order_acquire);
      if (counter == nullptr) {
        // Add returns the same counter for the same labels, so a race is harmless.
        counter = &family_->Add({{"tenant", name_}, {"code", CodeName(code)}});
        counters_[index].store(counter, std::memory_order_release);
      }
      counter->Increment();
    }
    TenantTotals Totals() const {
      TenantTotals totals;
      totals.name = name_;
      for (int code = 0; code < kCodes; ++code) {
        const Counter* counter = counters_[code].load(std::memory_order_acquire);
        if (counter == nullptr) continue;
        (code == 0 ? totals.ok : totals.failed) += static_cast<uint64_t>(counter->Value());
      }
      return totals;
    }

   private:
    Family<Counter>* family_;
    std::string name_;
    std::array<std::atomic<Counter*>, kCodes> counters_{};
  };

  std::mutex mutex;  // guards tenants and scrapes
  std::map<std::string, std::unique_ptr<Tenant>> tenants;
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) { impl_->build.Set(1); }
Metrics::~Metrics() = default;

void Metrics::OnLaunch(const scheduler::LaunchReport& report) {
  Impl& m = *impl_;
  const bool prefill = report.rows_extend + report.rows_prefill > 0;
  Counter& kind = !prefill                 ? m.launches_decode
                  : report.rows_decode > 0 ? m.launches_mixed
                                           : m.launches_prefill;
  kind.Increment();
  if (!report.ok) m.kernel_errors.Increment();
  m.phase_schedule.Observe(Seconds(report.schedule_ns));
  m.phase_plan.Observe(Seconds(report.plan_ns));
  m.phase_run.Observe(Seconds(report.kernel_ns));
  m.phase_complete.Observe(Seconds(report.complete_ns));
  m.launch_requests.Observe(report.requests);
  m.launch_records.Observe(report.records);
  m.launch_layers.Observe(report.layers);
  m.launch_clients.Observe(report.clients);
  if (report.rows_decode > 0) m.rows_decode.Observe(report.rows_decode);
  if (report.rows_extend > 0) m.rows_extend.Observe(report.rows_extend);
  if (report.rows_prefill > 0) m.rows_prefill.Observe(report.rows_prefill);
  m.imbalance.Observe(report.imbalance);
  m.partials.Observe(report.partials);
}

void Metrics::OnRequest(const scheduler::StreamRequest& request, const absl::Status& status,
                        int64_t total_ns) {
  impl_->request_duration[static_cast<size_t>(request.kind)]->Observe(Seconds(total_ns));
  if (request.kind == scheduler::RequestKind::kAttend && status.ok()) {
    impl_->request_queue.Observe(Seconds(request.timings.queue_ns));
  }
}

void Metrics::OnSequenceClosed(int64_t rows, int64_t open_ns) {
  impl_->sequence_rows.Observe(static_cast<double>(rows));
  impl_->sequence_lifetime.Observe(Seconds(open_ns));
}

void Metrics::OnPageGroupFreed(int64_t held_ns) { impl_->page_lifetime.Observe(Seconds(held_ns)); }

TenantCounters* Metrics::ForTenant(const std::string& tenant) {
  const std::lock_guard lock(impl_->mutex);
  auto& tenants = impl_->tenants;
  auto found = tenants.find(tenant);
  const std::string name =
      found != tenants.end() || tenants.size() < kMaxTenants ? tenant : "other";
  auto& slot = tenants[name];
  if (slot == nullptr) slot = std::make_unique<Impl::Tenant>(&impl_->requests, name);
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

void Metrics::SetTenants(std::shared_ptr<const scheduler::TenantTable> tenants, int32_t most) {
  const std::lock_guard lock(impl_->mutex);
  impl_->tenant_metrics.Watch(std::move(tenants), most);
}

void Metrics::SetServing(bool serving) { impl_->serving.Set(serving ? 1 : 0); }

void Metrics::SetTls(const TlsStats& stats) {
  Impl& m = *impl_;
  const std::lock_guard lock(m.mutex);
  RaiseTo(m.tls_reloads, static_cast<double>(stats.reloads));
  RaiseTo(m.tls_refused, static_cast<double>(stats.refused));
  m.tls_files_refused.Set(stats.files_refused ? 1 : 0);
  const auto expires = [&](const char* file, int64_t seconds) {
    if (seconds != 0) m.tls_expiry.Add({{"file", file}}).Set(static_cast<double>(seconds));
  };
  expires("cert", stats.cert_expires);
  expires("client_ca", stats.client_ca_expires);
  expires("client_crl", stats.client_crl_expires);
}

std::vector<TenantTotals> Metrics::Tenants() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<TenantTotals> all;
  for (const auto& [name, tenant] : impl_->tenants) all.push_back(tenant->Totals());
  return all;
}

Distribution Metrics::AttendTimes() const {
  return DistributionOf(
      *impl_->request_duration[static_cast<size_t>(scheduler::RequestKind::kAttend)]);
}

Distribution Metrics::QueueTimes() const { return DistributionOf(impl_->request_queue); }

std::string Metrics::Expose(const scheduler::EngineStats& stats) {
  Impl& m = *impl_;
  const std::lock_guard lock(m.mutex);
  const auto count = [](auto value) { return static_cast<double>(value); };
  m.waiting.Set(stats.requests_waiting);
  for (size_t stage = 0; stage < m.oldest_waiting.size(); ++stage) {
    m.oldest_waiting[stage]->Set(Seconds(stats.oldest_waiting_ns[stage]));
  }
  m.running.Set(stats.requests_running);
  m.steps_open.Set(stats.open_steps);
  m.sequences.Set(stats.sequences);
  m.models.Set(stats.models);
  m.pages_used.Set(count(stats.page_groups_used));
  m.pages_free.Set(count(stats.page_groups_free));
  m.pages_shared.Set(count(stats.page_groups_shared));
  m.kv_used.Set(count(stats.kv_bytes_used));
  m.kv_usage.Set(stats.kv_bytes_total > 0 ? count(stats.kv_bytes_used) / count(stats.kv_bytes_total)
                                          : 0);
  m.streams.Set(wire_.streams.load());
  m.shared_regions.Set(wire_.shared_regions.load());
  m.rings.Set(wire_.rings.load());
  RaiseTo(m.slices_fused, count(stats.slices_fused));
  RaiseTo(m.slice_waits_expired, count(stats.slice_waits_expired));
  RaiseTo(m.slice_waits_skipped, count(stats.slice_waits_skipped));
  RaiseTo(m.steps_aborted, count(stats.steps_aborted));
  RaiseTo(m.leases_expired, count(stats.leases_expired));
  RaiseTo(m.models_expired, count(stats.models_expired));
  m.tenant_metrics.Update();
  RaiseTo(m.pages_scrubbed, count(stats.page_groups_scrubbed));
  RaiseTo(m.copies_on_write, count(stats.copies_on_write));
  RaiseTo(m.pages_taken, count(stats.page_groups_taken));
  RaiseTo(m.pages_released, count(stats.page_groups_released));
  RaiseTo(m.pages_expired, count(stats.page_groups_expired));
  RaiseTo(m.pages_truncated, count(stats.page_groups_truncated));
  RaiseTo(m.pages_uncommitted, count(stats.page_groups_uncommitted));
  RaiseTo(m.kv_read, count(stats.kv_bytes_read));
  RaiseTo(m.total_decode, count(stats.rows_decode));
  RaiseTo(m.total_extend, count(stats.rows_extend));
  RaiseTo(m.total_prefill, count(stats.rows_prefill));
  RaiseTo(m.plan_hit, count(stats.plan_hits));
  RaiseTo(m.plan_miss, count(stats.plan_misses));
  RaiseTo(m.received, count(wire_.received_bytes.load()));
  RaiseTo(m.sent, count(wire_.sent_bytes.load()));
  RaiseTo(m.copied, count(wire_.copied_bytes.load()));
  RaiseTo(m.shared_received, count(wire_.shared_received_bytes.load()));
  RaiseTo(m.shared_sent, count(wire_.shared_sent_bytes.load()));
  RaiseTo(m.streams_disconnected, count(wire_.streams_disconnected.load()));
  RaiseTo(m.rings_disconnected, count(wire_.rings_disconnected.load()));
  RaiseTo(m.regions_disconnected, count(wire_.regions_disconnected.load()));
  RaiseTo(m.connections_refused, count(wire_.connections_refused.load()));
  RaiseTo(m.shm_displaced, count(wire_.shm_displaced.load()));
  RaiseTo(m.shm_refusals, count(wire_.shm_refusals.load()));
  RaiseTo(m.write_blocked, count(wire_.write_blocked_ns.load()) * 1e-9);
  const ProcessUsage usage = ReadProcessUsage();
  RaiseTo(m.cpu_seconds, usage.cpu_seconds);
  m.resident.Set(count(usage.resident_bytes));
  m.virtual_bytes.Set(count(usage.virtual_bytes));
  m.open_fds.Set(count(usage.open_fds));
  m.max_fds.Set(count(usage.max_fds));
  m.threads.Set(count(usage.threads));
  m.start_time.Set(usage.start_time_seconds);
  return prometheus::TextSerializer().Serialize(m.registry->Collect());
}

std::vector<std::string> Metrics::Declared() {
  std::vector<std::string> names;
  for (const Declaration& declaration : kDeclarations) {
    const char* type = declaration.type == Type::kCounter ? "counter"
                       : declaration.type == Type::kGauge ? "gauge"
                                                          : "histogram";
    names.push_back(absl::StrCat(declaration.name, " ", type));
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace mla::server
