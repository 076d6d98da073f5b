// Checks of a completed launch: finds repeats that differ from the stored rows, and results that
// are not finite although their inputs are.
//
// The log-sum-exp of a query row depends on all that the row sees. With KV rows as the pool holds
// them and weights as uploads may be (kernels/formats/dtype.h), outputs are finite wherever it is
// finite. So only the log-sum-exp is checked, one number for each row and head. The inputs are read
// only where it is not finite.
//
// Findings are noted in the requests (StreamRequest::EngineFields). Each sequence notes from which
// row on its rows are not finite. Threading: the holder of the engine role. Allocates, and waits
// for copies of tensors in device memory, only in two cases: a result is not finite, or results
// cannot show whether new rows are finite (no queries, or index lists).
#ifndef MLA_SCHEDULER_LAUNCHING_RESULT_CHECK_H_
#define MLA_SCHEDULER_LAUNCHING_RESULT_CHECK_H_

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "scheduler/launching/batch_launch.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// Marks repeats whose KV rows differ from those stored before.
void CheckRepeats(const BatchLaunch& launch);
// Marks requests whose results are not finite although their inputs are. Results that are not
// finite because of their inputs are set to NaN.
void CheckResults(BatchLaunch* launch, kernels::AttentionBackend* backend);
// Returns OK, or the error for what CheckRepeats and CheckResults have found.
absl::Status ResultOf(const StreamRequest& request);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_LAUNCHING_RESULT_CHECK_H_
