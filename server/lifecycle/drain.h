// Takes the server out of service without losing finished work.
//
// Drain refuses new sequences and steps, and waits until no step is open or the deadline has
// passed. It then aborts the remaining steps. Each second it reports what it waits for, in the log
// and in ServerState.
//
// Threading: Run may be called from any thread and more than once. Further callers wait for the
// same drain and get its result; the earliest deadline counts. Cancel may be called from any
// thread.
#ifndef MLA_SERVER_LIFECYCLE_DRAIN_H_
#define MLA_SERVER_LIFECYCLE_DRAIN_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/engine.h"
#include "server/lifecycle/server_state.h"

namespace mla::server {

struct DrainResult {
  bool drained = false;  // false: steps were aborted at the deadline, or the drain was cancelled
  bool cancelled = false;
  int32_t aborted_steps = 0;
  std::string message;
  // The drain's hand-over was refused, because another drain runs or has ended; nothing was done.
  bool refused = false;
};

// Moves sequences to another server while a drain runs. It ends with the drain: `stop` is called
// before the server takes new work again and before steps are aborted.
struct DrainHandOver {
  std::string peer;  // HOST:PORT, as clients are told
  std::function<void()> start;
  std::function<bool()> done;  // returns true if nothing that could move is left
  std::function<void()> stop;  // interrupts the hand-over and waits for its end
};

class Drain final {
 public:
  Drain(scheduler::Engine* engine, ServerState* state) : engine_(engine), state_(state) {}
  // `for_good`: the server is stopping, so Cancel is refused from now on. `hand_over` may be null.
  // It is used by this drain only and must outlive the call.
  DrainResult Run(std::chrono::milliseconds deadline, bool for_good = false,
                  const DrainHandOver* hand_over = nullptr);
  // Ends a running drain, or undoes one that has ended, so that the server takes new work again.
  // Returns false if no drain has begun or the server is stopping.
  bool Cancel();

 private:
  scheduler::Engine* const engine_;
  ServerState* const state_;
  DrainResult WaitForSteps(const DrainHandOver* hand_over);
  void Reopen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::chrono::steady_clock::time_point end_ ABSL_GUARDED_BY(mutex_) =
      std::chrono::steady_clock::time_point::max();
  bool running_ ABSL_GUARDED_BY(mutex_) = false;  // begun, and not cancelled
  bool for_good_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancel_ ABSL_GUARDED_BY(mutex_) = false;     // tells the waiting drain to end
  uint64_t cancelled_ ABSL_GUARDED_BY(mutex_) = 0;  // drains
  std::optional<DrainResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_DRAIN_H_
