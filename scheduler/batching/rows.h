// Tells which rows of its step a request still has to compute.
#ifndef MLA_SCHEDULER_BATCHING_ROWS_H_
#define MLA_SCHEDULER_BATCHING_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "scheduler/request.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

// Returns the number of rows of the step that the request still has to compute: [FirstRow, EndRow).
inline int32_t FirstRow(const StreamRequest& request) {
  return request.attend.row_begin + request.engine.rows_done;
}
inline int32_t EndRow(const StreamRequest& request) {
  return request.attend.row_begin + request.attend.row_count;
}
// Returns true if the request brings new KV rows; rows of a repeat are only compared.
inline bool Appends(const StreamRequest& request) {
  return request.attend.has_kv && !request.engine.repeat;
}
// Returns the entry of the step that contains the row. REQUIRES: 0 <= row < step.total_rows.
inline const StepEntry* EntryOf(const Step& step, int32_t row) {
  const auto after =
      std::upper_bound(step.entries.begin(), step.entries.end(), row,
                       [](int32_t r, const StepEntry& entry) { return r < entry.offset; });
  return &*(after - 1);
}

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_ROWS_H_
