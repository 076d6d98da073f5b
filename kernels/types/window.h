// Describes attention to a window and to compressed entries, as DeepSeek V4 has it
// (AttentionKind::kWindow). A query row attends, in one softmax, to
//
//   - the last rows of its sequence, itself included, as many as the window holds
//   - entries, each of which stands for `ratio` positions: all complete ones, or an index list
//   - a sink: a logit of each head with a value of zero, which the log-sum-exp leaves out
//
// Rows and entries serve as keys and as values in all their elements, so outputs are as wide as
// queries. Places of a plan count the rows of the window first, oldest first, then the entries.
#ifndef MLA_KERNELS_TYPES_WINDOW_H_
#define MLA_KERNELS_TYPES_WINDOW_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace mla::kernels {

// A window has at most this number of rows.
inline constexpr int32_t kMaxWindow = 4096;

// Adds to a SegmentRecord, which says where the rows of the window lie. Index lists of the
// SegmentRecord name entries; without lists, all complete entries are attended to.
struct WindowRecord {
  int32_t window;  // rows, >= 1
  int32_t ratio;   // positions that an entry stands for; 0: no entries
  // These fields address the entries. The fields mean what they mean in SegmentRecord; page_size
  // counts entries.
  int64_t page_table;
  int64_t layer_offset;
  int64_t row_stride;
  int32_t page_size;
  const float* sinks;  // [num_heads] of the segment, or null if heads have no sinks
};
static_assert(std::is_trivially_copyable_v<WindowRecord>);

// Returns the number of rows of the window for a query row that sees `visible` positions.
inline int32_t WindowRows(const WindowRecord& record, int32_t visible) {
  return std::min(record.window, visible);
}
inline int32_t WholeEntries(const WindowRecord& record, int32_t visible) {
  return record.ratio == 0 ? 0 : visible / record.ratio;
}

// Returns the factor by which a sink scales an output whose log-sum-exp, without the sink, is
// `lse`.
inline double SinkFactor(float sink, double lse) {
  if (lse == -std::numeric_limits<double>::infinity()) return 1.0;  // the output is 0
  return 1.0 / (1.0 + std::exp(double{sink} - lse));
}

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_WINDOW_H_
