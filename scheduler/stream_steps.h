// The open steps of one stream, with the shape by which its transport sizes a message that names
// only a step.
//
// The engine adds a step when a BeginStep of the stream has begun or joined it, and removes it when
// the step ends for any reason. Both happen before the answer or the abort is delivered. So the
// list has every step that the stream may use, except for steps that a BeginStep in flight will
// create.
//
// Ownership: shared by the engine and the transport. Threading: Find from any thread, Add and
// Remove with the engine role held. Allocates only while the list grows.
#ifndef MLA_SCHEDULER_STREAM_STEPS_H_
#define MLA_SCHEDULER_STREAM_STEPS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/model.h"
#include "scheduler/request.h"

namespace mla::scheduler {

struct StepShape {
  std::shared_ptr<const ModelSpec> model;
  int32_t rows = 0;         // of all its sequences
  StepPositions positions;  // as the BeginStep of the stream had them
};

class StreamSteps final {
 public:
  // Returns false, and leaves `shape` unchanged, if the stream has no such open step.
  bool Find(StepId id, StepShape* shape) const {
    const MutexLock lock(mutex_);
    const auto found = Position(id);
    if (found == steps_.end()) return false;
    *shape = found->second;
    return true;
  }

  void Add(StepId id, StepShape shape) {
    const MutexLock lock(mutex_);
    if (Position(id) == steps_.end()) steps_.emplace_back(id, std::move(shape));
  }

  void Remove(StepId id) {
    const MutexLock lock(mutex_);
    const auto found = Position(id);
    if (found == steps_.end()) return;
    const auto at = steps_.begin() + (found - steps_.cbegin());
    std::swap(*at, steps_.back());
    steps_.pop_back();
  }

 private:
  using Steps = std::vector<std::pair<StepId, StepShape>>;  // Limits::max_open_steps at most
  Steps::const_iterator Position(StepId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::find_if(steps_.begin(), steps_.end(),
                        [id](const auto& step) { return step.first == id; });
  }

  mutable Mutex mutex_;
  Steps steps_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STREAM_STEPS_H_
