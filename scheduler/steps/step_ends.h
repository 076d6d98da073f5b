// Ends steps. Its EndStep commits the rows of its sequences and sets their tails; an abort rolls
// all of them back.
//
// Ownership: borrows the objects of StepParts and the streams. Threading: the engine role.
#ifndef MLA_SCHEDULER_STEPS_STEP_ENDS_H_
#define MLA_SCHEDULER_STEPS_STEP_ENDS_H_

#include <string>

#include "absl/status/status.h"
#include "scheduler/steps/step_parts.h"

namespace mla::scheduler {

class StepEnds final {
 public:
  StepEnds(const StepParts& parts, Streams* streams)
      : limits_(parts.limits),
        cache_(parts.cache),
        sequences_(parts.sequences),
        steps_(parts.steps),
        answers_(parts.answers),
        stats_(parts.stats),
        streams_(streams) {}

  // Commits the step of an EndStep, or refuses. Returns OK and sets *wait if the step still has
  // requests; FinishIfIdle then answers when they are done.
  absl::Status End(Step* step, StreamRequest* request, bool* wait);
  // Commits the step and answers its EndStep, if that waits and the step has no more requests.
  void FinishIfIdle(Step* step) {
    if (step->end != nullptr && step->idle() && !step->failed) Finish(step);
  }
  // Rolls the step back because of `why`. An EndStep that waits gets `answer`. REQUIRES: no launch
  // carries a request of the step, and none waits.
  void Abort(Step* step, const absl::Status& answer, const std::string& why);

 private:
  void Finish(Step* step);
  absl::Status Commit(Step* step, StreamRequest* request);
  void Close(Step* step, const std::string& why_aborted);

  const Limits& limits_;
  kvcache::KvCache* const cache_;
  SequenceTable* const sequences_;
  StepTable* const steps_;
  AnswerCollector* const answers_;
  EngineStats* const stats_;
  Streams* const streams_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_STEP_ENDS_H_
