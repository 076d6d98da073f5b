// Tests windows, entries and sinks, and the indexer.
#ifndef MLA_KERNELS_HIP_SELF_TEST_SPARSE_H_
#define MLA_KERNELS_HIP_SELF_TEST_SPARSE_H_

#include "absl/status/status.h"
#include "kernels/attention_backend.h"

namespace mla::kernels::hip::self_test {

inline constexpr int32_t kIndexTopK = 16;

// Checks one launch for each format of rows: a query row whose tile is split, and a query row whose
// list names an entry and a place without one. Does nothing if the backend has no windows.
absl::Status CheckWindows(AttentionBackend& backend);
// Checks the choice of a query row. Does nothing if the backend has no indexer.
absl::Status CheckIndexer(AttentionBackend& backend);

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_SPARSE_H_
