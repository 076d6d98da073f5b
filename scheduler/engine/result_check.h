// What a launch that has ended shows of its requests: repeats that differ from what is stored, and
// results that are not finite though their inputs are.
//
// What a query row sees decides its log-sum-exp: with KV rows as the pool holds them and weights as
// uploads may be (kernels/formats/dtype.h), outputs are finite wherever it is. So it alone is
// looked at, one number for each row and head; the inputs are looked at only where it is not
// finite.
//
// What is found is noted in the requests (StreamRequest::EngineFields), and in the sequences from
// where on their rows are not finite. Threading: the holder of the engine role. Allocates, and
// waits for copies of tensors in device memory, only where a result is not finite, or where nothing
// shows whether new rows are (no queries, or index lists).
#ifndef MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_
#define MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Marks repeats whose KV rows are not those stored before.
void CheckRepeats(const BatchLaunch& launch);
// Marks requests whose results are not finite though their inputs are. Results that are not finite
// because of their inputs become NaN.
void CheckResults(BatchLaunch* launch, kernels::AttentionBackend* backend);
// OK, or what CheckRepeats and CheckResults have found.
absl::Status ResultOf(const StreamRequest& request);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_
