// Drives steps from several threads and measures them: a closed loop, where each worker starts a
// step when its last one is done, or an open loop, where steps arrive at a fixed rate even if the
// server does not keep up.
//
// Open-loop latency runs from the intended arrival. So a stall delays every step that should have
// started during it, and not only one step a worker (coordinated omission). Steps that had arrived
// but not finished when the run ended count with the time that they had waited.
//
// LoadHooks define a step. A step that fails with a retry hint is counted and the loop
// goes on after the hinted time; any other failure ends the run.
#ifndef MLA_CLIENT_MLACTL_LOAD_LOAD_LOOP_H_
#define MLA_CLIENT_MLACTL_LOAD_LOAD_LOOP_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/session.h"
#include "client/mlactl/load/arrivals.h"
#include "client/mlactl/load/latency_histogram.h"

namespace mla::mlactl {

using LoadClock = std::chrono::steady_clock;

// The stages of a request that are timed. The server's stages come from each Attend's reply.
enum class Stage {
  kStep,        // closed loop: start to end; open loop: intended arrival to end
  kStartDelay,  // open loop: intended arrival to start
  kBegin,       // BeginStep, request to reply
  kAttend,      // one layer, request to reply
  kNetwork,     // kAttend without the server's stages: transport, both ends' framing and wake-ups
  kQueue,
  kPlan,
  kKernel,
  kWrite,
  kEnd,  // EndStep, request to reply
};
inline constexpr size_t kStages = 10;
inline constexpr std::array<const char*, kStages> kStageNames = {
    "step", "start_delay", "begin", "attend", "network", "queue", "plan", "kernel", "write", "end"};

struct LoadCounts {
  std::array<LatencyHistogram, kStages> stages;
  uint64_t steps = 0, attends = 0, bytes = 0;
  uint64_t unfinished = 0;                   // open loop: arrived, not done when the run ended
  std::map<std::string, uint64_t> failures;  // by reason
  // Sums over attends: requests, layers and clients of the launch that served it, and how many
  // found their plan made.
  uint64_t launch_requests = 0, launch_layers = 0, launch_clients = 0, plans_reused = 0;

  const LatencyHistogram& of(Stage stage) const { return stages[static_cast<size_t>(stage)]; }
  LatencyHistogram& of(Stage stage) { return stages[static_cast<size_t>(stage)]; }
  void Merge(const LoadCounts& other);
};

struct SeriesPoint {
  double at_s = 0;  // end of the interval, since the measurement began
  double steps_per_s = 0;
  int64_t p50_ns = 0, p99_ns = 0, max_ns = 0;
};

struct LoadResult {
  LoadCounts counts;
  double seconds = 0;  // measured
  std::vector<SeriesPoint> series;
  bool interrupted = false;
};

struct LoadProgress {
  bool warming = false;
  double seconds = 0;         // of the measurement so far
  double target_seconds = 0;  // 0: until a number of steps
  uint64_t steps = 0, failed = 0;
  SeriesPoint latest;
};

struct LoadOptions {
  uint32_t concurrency = 1;  // workers; in an open loop the most steps under way
  double rate_per_s = 0;     // 0: closed loop
  ArrivalKind arrivals = ArrivalKind::kPoisson;
  uint64_t seed = 1;
  uint64_t steps = 0;  // > 0: measures this many steps, however long they take
  double warmup_s = 1, duration_s = 10;
};

// Measures one worker. Only that worker's thread writes it.
class LoadRecorder final {
 public:
  // True when the run has ended: a step should return early, with any status.
  bool stopping() const;
  void Begin(LoadClock::time_point sent, LoadClock::time_point done);
  // `bytes` counts the tensors in both directions.
  void Attend(LoadClock::time_point sent, LoadClock::time_point done,
              const client::AttendTimes& times, uint64_t bytes);
  void End(LoadClock::time_point sent, LoadClock::time_point done);

 private:
  friend class LoadRun;
  bool Measured(LoadClock::time_point at) const;
  void Record(Stage stage, LoadClock::time_point sent, LoadClock::time_point done);

  const class LoadRun* run_ = nullptr;
  LoadCounts counts_;
  Mutex mutex_;  // guards interval_ and failed_
  LatencyHistogram interval_ ABSL_GUARDED_BY(mutex_);
  uint64_t failed_ ABSL_GUARDED_BY(mutex_) = 0;
};

struct LoadHooks {
  // Called on the worker's thread before the clock starts; a failure ends the run.
  std::function<absl::Status(uint32_t worker)> set_up;
  std::function<absl::Status(uint32_t worker, LoadRecorder* recorder)> step;
  // Called on the worker's thread at the end, even if set_up failed.
  std::function<void(uint32_t worker)> tear_down;
  // Called on the caller's thread, about ten times a second.
  std::function<void(const LoadProgress&)> progress;
};

// Returns when all workers have been torn down. `interrupted` may be set at any time and ends the
// run within a step's request. FAILED_PRECONDITION when no step finished.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const LoadHooks& hooks,
                                   const std::atomic<bool>& interrupted);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_LOAD_LOAD_LOOP_H_
