// Gives stored rows of kFp8Row scales that no server writes, as imported pages may have them.
#ifndef MLA_TESTS_CONFORMANCE_SUITE_OTHER_SCALES_H_
#define MLA_TESTS_CONFORMANCE_SUITE_OTHER_SCALES_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"

namespace mla::conformance {

// Multiplies the scales of the rows that `where` names by numbers below 2, most of which are no
// powers of two. In some rows all groups have the same number, in others each has its own, and in a
// few the scale of one group becomes 0. The numbers depend on the row's position alone.
// If `last_invalid`, the last row's first group gets a number that is no scale, which makes its
// values NaN. `page_tables` is as in Launch. Blocks; `slot` must be idle. Fails as Submit and Wait
// do.
absl::Status ChangeScales(kernels::AttentionBackend& backend, int32_t slot,
                          std::span<const uint32_t> page_tables, const kernels::AppendRecord& where,
                          bool last_invalid);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SUITE_OTHER_SCALES_H_
