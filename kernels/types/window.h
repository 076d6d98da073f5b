// Attention to a window and to compressed entries, as DeepSeek V4 has it (AttentionKind::kWindow).
// A query row attends, in one softmax, to
//
//   the last rows of its sequence, itself among them, as many as the window holds
//   entries, each of which stands for `ratio` positions: all that are whole, or those of an index
//   list
//   a sink: a logit of each head with a value of zero, no part of the log-sum-exp
//
// Rows and entries are keys and values alike, all their values: outputs are as wide as queries.
// Places of a plan are those of the window first, from the oldest on, then the entries.
#ifndef MLA_KERNELS_TYPES_WINDOW_H_
#define MLA_KERNELS_TYPES_WINDOW_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace mla::kernels {

// Of any window.
inline constexpr int32_t kMaxWindow = 4096;

// What a segment has beside its SegmentRecord, which says where the rows of the window lie. Index
// lists of the SegmentRecord are of entries; without them all whole ones are attended to.
struct WindowRecord {
  int32_t window;  // rows, >= 1
  int32_t ratio;   // positions that an entry stands for; 0: there are no entries
  // Where entries lie, as the SegmentRecord has it of rows; page_size counts entries.
  int64_t page_table;
  int64_t layer_offset;
  int64_t row_stride;
  int32_t page_size;
  const float* sinks;  // [num_heads] of the segment, or null: there are none
};
static_assert(std::is_trivially_copyable_v<WindowRecord>);

// Of a query row that sees `visible` positions.
inline int32_t WindowRows(const WindowRecord& record, int32_t visible) {
  return std::min(record.window, visible);
}
inline int32_t WholeEntries(const WindowRecord& record, int32_t visible) {
  return record.ratio == 0 ? 0 : visible / record.ratio;
}

// By how much a sink makes an output smaller whose log-sum-exp, without it, is `lse`.
inline double SinkFactor(float sink, double lse) {
  if (lse == -std::numeric_limits<double>::infinity()) return 1.0;  // the output is 0
  return 1.0 / (1.0 + std::exp(double{sink} - lse));
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_WINDOW_H_
