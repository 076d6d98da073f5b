// Declares every metric of the server once: metrics that sample a number of the engine or the
// transport in stats_table.cc, the others in metrics.cc.
//
// Counters and histograms are fed as things happen: launches and requests through EngineObserver
// (without allocation, and waiting only for one short lock), wire counters from the transport. Rows
// of stats_table.cc are sampled at each scrape.
//
// Labels are bounded: requests of tenants beyond the first 64 are counted as "other". Use by
// tenants is shown for `tenants.metrics` of them, chosen at each scrape.
//
// Threading: all methods from any thread.
#ifndef MLA_SERVER_METRICS_METRICS_H_
#define MLA_SERVER_METRICS_METRICS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/attention_backend.h"
#include "kernels/backend_registry.h"
#include "scheduler/engine.h"
#include "scheduler/tenant_table.h"
#include "server/metrics/histograms.h"
#include "server/metrics/stats_table.h"

namespace mla::server {

struct ReloadStats;  // server/config/config.h
struct TracerStats;  // server/tracing/tracer.h

// Counts the requests of one tenant by status code. Metrics owns it and keeps it as long as itself.
class TenantCounters final {
 public:
  static constexpr int kCodes = 17;  // of absl::StatusCode
  void Count(absl::StatusCode code) {
    const int index = std::clamp(static_cast<int>(code), 0, kCodes - 1);
    counts_[index].fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t count(int code) const { return counts_[code].load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kCodes> counts_{};
};

// Calls and requests of one tenant, as counted in mla_requests_total.
struct TenantTotals {
  std::string name;
  uint64_t ok = 0, failed = 0;
};

struct MetricRow {
  absl::string_view name;
  absl::string_view type;  // counter, gauge or histogram
  absl::string_view help;
};

class Metrics final : public scheduler::EngineObserver {
 public:
  Metrics();
  ~Metrics() override;

  void OnLaunch(const scheduler::LaunchReport& report) override;
  void OnRequest(const scheduler::RequestReport& report) override;
  void OnSequenceClosed(int64_t rows, int64_t open_ns) override;
  void OnPageGroupFreed(int64_t held_ns) override;

  WireCounters& wire() { return wire_; }
  CheckpointCounters& checkpoints() { return checkpoints_; }
  HandOverCounters& hand_overs() { return hand_overs_; }
  TenantCounters* ForTenant(const std::string& tenant);
  // Counts a request that was refused before the engine took it.
  void CountRejected(const std::string& reason);
  void SetBackend(const kernels::BackendInfo& info, int64_t kv_bytes, int64_t total_bytes);
  void SetCandidates(std::span<const kernels::BackendCandidate> candidates);

  // Sets the metric of grpc.health.v1's present answer, which is 0 until the first call.
  void SetServing(bool serving);

  // `expires`: by file, Unix seconds; 0 if the file is not configured.
  void SetTls(const ReloadStats& status, const std::map<std::string, int64_t>& expires);
  void SetConfig(const ReloadStats& status);
  void SetTraces(const TracerStats& stats);

  // From now on Expose shows what tenants use: first tenants with a quota in the configuration,
  // then those with the largest share of a bound. `most` of them are shown by name, and the others
  // summed as "other".
  void SetTenants(std::shared_ptr<const scheduler::TenantTable> tenants, int32_t most);
  // Returns totals by tenant name; tenants beyond the bound are summed up as "other".
  std::vector<TenantTotals> Tenants() const;
  // Return seconds of Attend requests: inside the server, and from arrival to launch.
  Distribution AttendTimes() const;
  Distribution QueueTimes() const;

  // Shows a traced request next to the buckets that count it (Histograms::ShowTrace).
  void ShowTrace(scheduler::RequestKind kind, int64_t total_ns, int64_t queue_ns,
                 const std::string& trace_id);

  // Returns the values of `stats` and all others as text: Prometheus's, or OpenMetrics with
  // exemplars.
  std::string Expose(const scheduler::EngineStats& stats, bool open_metrics = false);

  // Returns every metric, by name: dashboards and alerts may rely on them. docs/metrics.md lists
  // the same.
  static std::vector<MetricRow> Declared();

 private:
  struct Impl;
  WireCounters wire_;
  CheckpointCounters checkpoints_;
  HandOverCounters hand_overs_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_METRICS_H_
