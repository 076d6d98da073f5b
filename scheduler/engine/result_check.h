// Which results of a launch are not finite, and whether their inputs account for it.
//
// What a query row sees decides its log-sum-exp: with KV rows as the pool holds them and weights as
// uploads may be (kernels/dtype.h), outputs are finite wherever it is. So it alone is looked at,
// one number for each row and head; the inputs are looked at only where it is not finite.
//
// Threading: free functions over memory that no thread writes meanwhile.
#ifndef MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_
#define MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_

#include <cstdint>

#include "scheduler/request.h"

namespace mla::scheduler {

// Index of the first value that is NaN or infinite; `count` if there is none.
int64_t FirstNotFinite(const float* values, int64_t count);

// Whether `count` elements hold a NaN or an infinity. Elements may begin at any address.
bool HoldsNotFinite(const std::byte* elements, kernels::DType dtype, int64_t count);

// Whether the query of one row and head of a request holds one; `dim` elements each.
bool QueryHoldsNotFinite(const AttendArgs& args, int64_t row, int64_t head, int64_t dim);

// Writes NaN to all `dim` outputs of one row and head, and to its log-sum-exp if there is one.
void MarkNotANumber(const AttendArgs& args, int64_t row, int64_t head, int64_t dim);

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_RESULT_CHECK_H_
