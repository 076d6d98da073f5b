// Launches of an indexer and what they must choose, by an oracle of its own in fp64 that reads
// index keys as docs/sparse.md draws them, byte by byte.
//
// The chosen set must be the oracle's where the k-th and the (k + 1)-th logit are further apart
// than 2^-8 of the largest; elsewhere every chosen logit must come that close to the k-th. Of keys
// with equal bytes, the lower positions are chosen first.
#ifndef MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_WORKLOAD_H_
#define MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_WORKLOAD_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/dtype.h"

namespace mla::conformance {

struct IndexerCase {
  uint64_t seed = 0;
  int32_t heads = 64, dim = 128, page_size = 64, positions = 1000, rows = 1, top_k = 64;
  kernels::DType dtype = kernels::DType::kBf16;
  int32_t distinct = 0;  // values that keys take; 0: as many as there are
  bool alike = false;    // keys are nearly one and the same
};

std::string ToString(const IndexerCase& c);
// Of index keys of one of `dims` elements each.
std::vector<IndexerCase> IndexerCases(int32_t count, const std::vector<int32_t>& dims);
// Of so many positions that backends which gather what may be chosen, first or at all, have too
// little room for it; and of lists as long as DeepSeek V3.2 has them.
std::vector<IndexerCase> LongIndexerCases();
// A backend that is to run such cases.
kernels::BackendLimits IndexerLimits();

// One thread.
class IndexerWorkload {
 public:
  explicit IndexerWorkload(const IndexerCase& c);

  // Lists by row, as the backend chose them in one launch with the rows [first, first + rows); an
  // error too where the pages are not those of the backends before it, or the lists as they are
  // returned are others.
  absl::StatusOr<std::vector<std::vector<int32_t>>> Run(kernels::AttentionBackend& backend,
                                                        int32_t first, int32_t rows);
  // All that a backend must do of the case.
  absl::Status Check(kernels::AttentionBackend& backend);

 private:
  int32_t Visible(int32_t row) const { return c_.positions - c_.rows + row + 1; }
  int32_t Wanted(int32_t row) const { return std::min(Visible(row), c_.top_k); }
  absl::Status Launch(kernels::AttentionBackend& backend, int32_t first, int32_t rows,
                      const std::vector<int32_t>& begin, int32_t* list, int32_t* wanted);
  absl::Status CheckPages(kernels::AttentionBackend& backend);
  // What lies in the pages stands for what was sent, to e4m3's accuracy.
  absl::Status CheckKeys() const;
  absl::Status CheckList(int32_t row, const std::vector<int32_t>& list);
  double Stored(const std::vector<std::byte>& pages, int32_t position, int32_t i) const;
  double Key(int32_t position, int32_t i) const;
  double Logit(int32_t row, int32_t position) const;

  const IndexerCase c_;
  std::mt19937_64 random_;
  int64_t page_bytes_ = 0, group_granules_ = 0;
  std::vector<uint32_t> table_;
  std::vector<float> keys_, queries_, weights_;
  std::vector<std::byte> sent_keys_, inputs_;
  std::vector<double> stored_;               // keys as the pages have them
  std::vector<std::vector<double>> logits_;  // by row
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_WORKLOAD_H_
