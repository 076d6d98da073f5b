// Every metric of the server, declared once: those that sample a number that the engine or the
// transport keeps in stats_table.cc, the others in metrics.cc.
//
// Counters and histograms are fed as things happen: launches and requests through EngineObserver
// (no allocation, no waiting but for one short lock), wire counters from the transport. Rows of
// stats_table.cc are sampled at each scrape.
//
// Labels are bounded: requests of tenants beyond the first 64 are counted as "other"; what tenants
// use is shown for `tenants.metrics` of them, chosen at each scrape.
//
// Threading: all methods from any thread.
#ifndef MLA_SERVER_METRICS_METRICS_H_
#define MLA_SERVER_METRICS_METRICS_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/backend_registry.h"
#include "scheduler/engine.h"
#include "scheduler/tenant_table.h"
#include "server/metrics/histograms.h"
#include "server/metrics/stats_table.h"

namespace mla::server {

// Requests of one tenant by status code. Owned by Metrics, alive as long as it.
class TenantCounters {
 public:
  virtual ~TenantCounters() = default;
  virtual void Count(absl::StatusCode code) = 0;
};

// Of the TLS files, as TlsFiles says it. Times are Unix seconds; 0: there is no such file.
struct TlsStats {
  uint64_t reloads = 0, refused = 0;
  bool files_refused = false;  // those on disk now
  int64_t cert_expires = 0, client_ca_expires = 0, client_crl_expires = 0;
};

// Of the configuration, as ConfigReloader says it.
struct ConfigStats {
  uint64_t reloads = 0, refused = 0;
  bool refused_now = false;  // what is on disk
};

// Calls and requests of one tenant, as mla_requests_total counts them.
struct TenantTotals {
  std::string name;
  uint64_t ok = 0, failed = 0;
};

struct MetricRow {
  std::string name;
  std::string type;  // counter, gauge or histogram
  std::string help;
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
  // A request that was refused before the engine took it.
  void CountRejected(const std::string& reason);
  void SetBackend(const kernels::BackendInfo& info, int64_t kv_bytes, int64_t total_bytes);
  void SetCandidates(std::span<const kernels::BackendCandidate> candidates);

  // What grpc.health.v1 answers at this moment; 0 until the first call.
  void SetServing(bool serving);

  void SetTls(const TlsStats& stats);
  void SetConfig(const ConfigStats& stats);

  // From now on Expose shows what tenants use: those of the configuration's quotas, then those that
  // use the largest share of a bound, `most` of them by name and the others summed as "other".
  void SetTenants(std::shared_ptr<const scheduler::TenantTable> tenants, int32_t most);
  // By name; what lies beyond the bound of tenants is "other".
  std::vector<TenantTotals> Tenants() const;
  // Seconds of Attend requests inside the server, and from arrival to launch.
  Distribution AttendTimes() const;
  Distribution QueueTimes() const;

  // Prometheus text with the values of `stats`.
  std::string Expose(const scheduler::EngineStats& stats);

  // Every metric, by name: what dashboards and alerts may rely on. docs/metrics.md lists the same.
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
