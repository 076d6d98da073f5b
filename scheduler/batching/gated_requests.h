// Says which requests may be in a launch that waits on the device for their tensors (Launch::gate),
// and which of them may share one.
//
// Pure functions of requests that have a step. Threading: the engine role.
#ifndef MLA_SCHEDULER_BATCHING_GATED_REQUESTS_H_
#define MLA_SCHEDULER_BATCHING_GATED_REQUESTS_H_

#include "scheduler/request.h"

namespace mla::scheduler {

// Returns true if a launch that comes too late leaves no trace of the request.
bool CanBeGated(const StreamRequest& request);

// Returns true if both have the same rows of a step, and come from different participants of it.
bool AreSlices(const StreamRequest& a, const StreamRequest& b);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_GATED_REQUESTS_H_
