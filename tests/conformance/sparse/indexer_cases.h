// Cases of indexers (indexer_workload.h), and checks of any backend with them.
#ifndef MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_CASES_H_
#define MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_CASES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "tests/conformance/sparse/indexer_workload.h"

namespace mla::conformance {

// Cases whose index keys have one of `dims` elements each.
std::vector<IndexerCase> IndexerCases(int32_t count, const std::vector<int32_t>& dims);
// Cases with too many positions for the memory in which backends gather candidates, and with lists
// as long as DeepSeek V3.2's.
std::vector<IndexerCase> LongIndexerCases();
// A case with so many keys that each block of a GPU with 132 units has many of them, and with more
// rows than a warp has lanes.
IndexerCase ManyRowsIndexerCase();
// Small cases around bounds of kernels: more tiles of keys in a block than it holds at a time,
// pages of several tiles, more rows than a warp has lanes, equal keys, and keys past the last one
// in a tile.
std::vector<IndexerCase> DirectedIndexerCases();
// Requests that share a launch although their pages, dtypes and heads differ.
struct IndexerPair {
  IndexerCase first, second;
};
std::vector<IndexerPair> IndexerPairs();
// These check a case or a pair after `reference` has stored the bytes of its pages. Both backends
// are configured with IndexerLimits.
absl::Status CheckIndexer(kernels::AttentionBackend& reference, kernels::AttentionBackend& backend,
                          const IndexerCase& c);
absl::Status CheckIndexer(kernels::AttentionBackend& reference, kernels::AttentionBackend& backend,
                          const IndexerPair& pair);

// Runs the directed cases and the pairs on a backend, which it configures, up to the first failure.
// Prints a line that begins with FAIL, and returns the number of failures, 0 or 1. Returns an error
// if it could not run any.
absl::StatusOr<int64_t> RunDirectedIndexers(kernels::AttentionBackend& backend);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_CASES_H_
