// Streams and their steps: takes every request that arrives, and ends what has run out of time.
//
// A step is a transaction: BeginStep decides everything and reserves, EndStep commits, and whatever
// goes wrong in between rolls back the whole. StepEnds does the last two; LaunchQueue has the
// requests that wait for a launch, and Launches the launches.
//
// Ownership: the objects in StepParts are borrowed. Threading: the engine role.
#ifndef MLA_SCHEDULER_STEPS_STEP_MACHINE_H_
#define MLA_SCHEDULER_STEPS_STEP_MACHINE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/steps/launch_queue.h"
#include "scheduler/steps/launches.h"
#include "scheduler/steps/step_ends.h"
#include "scheduler/steps/step_parts.h"

namespace mla::scheduler {

class StepMachine final {
 public:
  explicit StepMachine(const StepParts& parts);

  Launches& launches() { return launches_; }
  const LaunchQueue& queue() const { return queue_; }

  // --- Streams and requests.
  StreamId OpenStream(const std::string& tenant,
                      std::shared_ptr<const StreamSteps>* steps = nullptr);
  void CloseStream(StreamId stream);
  // Answers the request or queues it. REQUIRES: AnswerCollector has admitted it.
  void Accept(StreamRequest* request);

  // --- Time. Fails requests that waited too long, and expires leases.
  void Tick();
  // Tells the engine that the process did not run for this time. Messages that clients sent during
  // the pause have yet to be read, so the time does not count against any deadline of theirs. Call
  // it before Tick and Accept.
  void NotePause(int64_t nanos);
  // Returns the next time at which Tick has something to do; max() if there is none.
  MonotonicNanos NextTick() const;

  int32_t AbortAll(const std::string& why);
  // Sets the figures that are about streams, steps, waiting requests and plans.
  void AddStats(EngineStats* stats) const;

 private:
  // Returns the open step of the request, or the error; then request->step_aborted is true if the
  // step was aborted.
  absl::StatusOr<Step*> FindStep(StreamRequest* request) const;
  // As FindStep, but refuses streams that did not begin the step.
  absl::StatusOr<Step*> FindAsLeader(StreamRequest* request) const;
  absl::Status BeginStep(StreamRequest* request);
  absl::Status JoinStep(Step* step, StreamRequest* request);
  absl::Status AcceptAttend(StreamRequest* request);
  absl::Status EndStep(StreamRequest* request, bool* wait);
  absl::Status AbortStepRequest(StreamRequest* request);

  const Limits& limits_;
  const Clock* const clock_;
  TenantTable* const tenants_;
  ModelTable* const models_;
  SequenceTable* const sequences_;
  StepTable* const steps_;
  StepOpener* const opener_;
  Launcher* const launcher_;
  CacheHints* const hints_;
  DrainState* const draining_;
  AnswerCollector* const answers_;
  EngineStats* const stats_;
  Streams streams_;
  StreamId next_stream_ = 1;
  StepEnds ends_;
  LaunchQueue queue_;
  Launches launches_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_STEP_MACHINE_H_
