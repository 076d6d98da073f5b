// The spans of the steps of one Attend stream or ring.
//
// A recorded step has a span "step", from the arrival of its BeginStep to the reply to its EndStep.
// Its children are one span for each message: "begin_step", "attend", "end_step" or "abort_step".
// An attend has further children:
//
//   receive   arrival of the message until the engine has it; tensors are copied here
//   queue     until a launch takes its first rows
//   launch    until the engine has the answer; its children are "plan" and "kernel"
//   reply     until the transport has written the reply
//
// Where an attend is computed by several launches, "launch" spans all of them, and "plan" and
// "kernel" have the sum of their times.
//
// Threading: any thread. Find is one relaxed load while no step of the stream is recorded.
#ifndef MLA_SERVER_TRACING_STEP_TRACES_H_
#define MLA_SERVER_TRACING_STEP_TRACES_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "scheduler/request.h"
#include "server/tracing/tracer.h"

namespace mla::server {

// The times of one message of a recorded step, in nanoseconds of the steady clock.
struct MessageTrace {
  TraceContext step;  // invalid: the step is not recorded
  int64_t received_ns = 0, submitted_ns = 0, answered_ns = 0;
  bool on() const { return step.sampled; }
};

class StepTraces {
 public:
  // Recorded steps of one stream that are open at a time; any more are not recorded.
  static constexpr size_t kMaxOpen = 256;

  // `tracer` may be null and must outlive it. `stream` is the parent of steps that name none.
  StepTraces(Tracer* tracer, std::string tenant, const TraceContext& stream);

  // Decides whether the step of a BeginStep is recorded.
  TraceContext Begin(scheduler::StepId id, std::string_view traceparent, int64_t now_ns,
                     const std::string& model);
  // Returns false if no step is recorded at present, as is usual. Then Find is not worth its call.
  bool any() const { return open_count_.load(std::memory_order_relaxed) != 0; }
  // Returns the context of a recorded step; else an invalid one.
  TraceContext Find(scheduler::StepId id) const;
  // Records the spans of a message whose reply has been written. `answer`: the message's.
  void Written(const scheduler::StreamRequest& message, const MessageTrace& trace,
               const absl::Status& answer, int64_t now_ns);

 private:
  struct Open {
    scheduler::StepId id = 0;
    TraceContext context;
    SpanId parent = 0;
    int64_t begin_ns = 0;
    std::string model;
  };
  void End(const scheduler::StreamRequest& message, const absl::Status& answer, int64_t now_ns,
           std::vector<TraceSpan>* spans);

  Tracer* const tracer_;
  const std::string tenant_;
  const TraceContext stream_;
  std::atomic<size_t> open_count_{0};
  mutable Mutex mutex_;
  std::vector<Open> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_TRACING_STEP_TRACES_H_
