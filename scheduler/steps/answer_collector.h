// The requests that the engine owns: admits them, answers them, and keeps answers and reports of
// launches until the holder of the engine role takes them.
//
// Threading: the engine role, except where a method says any thread.
#ifndef MLA_SCHEDULER_STEPS_ANSWER_COLLECTOR_H_
#define MLA_SCHEDULER_STEPS_ANSWER_COLLECTOR_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "scheduler/clock.h"
#include "scheduler/engine_types.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/steps/answer_queue.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

// Reports of the launches that ended while the role was held once, for one call of the observer.
struct LaunchReports {
  static constexpr int kMost = 2;
  int count = 0;
  std::array<LaunchReport, kMost> items;
};

class AnswerCollector final {
 public:
  // All outlive it; `observer` may be null.
  AnswerCollector(const Limits& limits, TenantTable* tenants, const Clock* clock,
                  EngineObserver* observer, EngineStats* stats)
      : limits_(limits), tenants_(tenants), clock_(clock), observer_(observer), stats_(stats) {}

  // Counts a request that arrives at `now` and is about to be handed over, or refuses it:
  // RESOURCE_EXHAUSTED when the tenant or the server has as many as it may. Any thread.
  absl::Status Admit(StreamRequest* request, MonotonicNanos now);
  // Returns the number of requests admitted and not yet answered. Any thread.
  int32_t owned() const { return owned_; }

  void Answer(StreamRequest* request, const absl::Status& status);
  void AnswerAt(MonotonicNanos now, StreamRequest* request, const absl::Status& status);
  // Gives the request back without an answer.
  void HandBack(StreamRequest* request, HandedBack why);
  void NoteReport(const LaunchReport& report);

  // From this call on, answers are collected for TakeAnswers; before it, Done is called at once.
  void Collect() { collects_ = true; }
  bool has_answers() const { return !answers_.empty(); }
  // Returns the answers since the last call, in the order in which they were given. The caller must
  // call Done for them.
  AnswerList TakeAnswers() { return std::exchange(answers_, {}); }
  // Reports of the launches that have ended since the last call. The caller passes them to the
  // observer once it has delivered the answers: metrics cost as much as a small reply.
  LaunchReports TakeReports() {
    LaunchReports taken;
    taken.count = std::exchange(reports_.count, 0);
    std::copy_n(reports_.items.begin(), taken.count, taken.items.begin());
    return taken;
  }

 private:
  void Return(StreamRequest* request, const absl::Status& status);

  const Limits& limits_;
  TenantTable* const tenants_;
  const Clock* const clock_;
  EngineObserver* const observer_;
  EngineStats* const stats_;
  bool collects_ = false;
  LaunchReports reports_;
  AnswerList answers_;
  std::atomic<int32_t> owned_{0};
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_ANSWER_COLLECTOR_H_
