// Known-answer test of every kernel, run on the device before the backend is offered: a wrong
// driver, a miscompiled code object or a broken device is found here and not in an answer.
#ifndef MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_
#define MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_

#include "absl/status/status.h"
#include "kernels/attention_backend.h"

namespace mla::kernels::hip {

// What the test asks of Configure; some tens of megabytes.
BackendLimits SelfTestLimits(const AttentionBackend& backend);

// Moves pages, with digests and without; then appends, absorbs, attends with a split plan, combines
// and projects small batches and attends to them in the expanded form, and compares with the same
// sums taken on the host, within what conformance allows: with a tile for the smallest attention
// kernel and with one for more; over few keys, and over so many, in pages of three rows, that every
// loop turns around more than once; three items and more a unit, one without any key; 130 query
// rows in the expanded form; and with a NaN in a row that only the last query row sees. Beside them
// it projects latent outputs that nearly cancel, of values that bf16 does not hold: a kernel that
// rounds them once more is found. Then come windows with entries and sinks, the choice of the
// indexer, and the expanded form at nope_dim 192 and v_dim 256, where the backend has them.
// REQUIRES: memory as SelfTestLimits. INTERNAL names the first value that is wrong.
absl::Status SelfTest(AttentionBackend& backend);

// The same of the expanded form with products of 8 bits, within what its roundings allow: of
// queries, keys, probabilities and values.
absl::Status SelfTestPrefill(AttentionBackend& backend);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_SELF_TEST_SELF_TEST_H_
