// Collects the content of the status page from sources that do not wait for a launch.
//
// Ownership: everything that the options point to must outlive it. Threading: any thread.
#ifndef MLA_SERVER_OPERATIONS_STATUS_SOURCE_H_
#define MLA_SERVER_OPERATIONS_STATUS_SOURCE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/backend_registry.h"
#include "scheduler/engine.h"
#include "server/config/config.h"
#include "server/connections/tls_files.h"
#include "server/lifecycle/server_state.h"
#include "server/memory/staging_pool.h"
#include "server/metrics/metrics.h"
#include "server/operations/status_page.h"

namespace mla::server {

struct StatusSourceOptions {
  const ServerState* state = nullptr;
  Metrics* metrics = nullptr;
  scheduler::Engine* engine = nullptr;
  const Config* config = nullptr;
  const StagingPool* staging = nullptr;
  const TlsFiles* tls = nullptr;  // null: TLS is off
  std::vector<kernels::BackendCandidate> candidates;
  uint64_t boot_id = 0;
  std::function<scheduler::EngineStats()> stats;  // must not wait for a launch
};

class StatusSource final {
 public:
  explicit StatusSource(StatusSourceOptions options)
      : options_(std::move(options)), start_(RateWindow::Clock::now()), rates_(start_) {}

  StatusPage Page();
  // Call it now and then, so that there is a past sample from which rates can be computed.
  void Note();

 private:
  StatusTotals Totals(const scheduler::EngineStats& stats) const;
  void AddMeters(const scheduler::EngineStats& stats, StatusPage* page) const;
  void AddTenants(StatusPage* page) const;
  void AddModels(StatusPage* page) const;
  void AddSections(const scheduler::EngineStats& stats, const ServerState::Snapshot& now,
                   StatusPage* page) const;

  const StatusSourceOptions options_;
  const RateWindow::Clock::time_point start_;
  Mutex mutex_;
  RateWindow rates_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_OPERATIONS_STATUS_SOURCE_H_
