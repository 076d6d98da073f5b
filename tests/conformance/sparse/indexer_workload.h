// Launches of an indexer, and the lists that it must choose, by an oracle of its own in fp64 that
// decodes index keys byte by byte as docs/sparse.md defines them.
//
// The chosen set must equal the oracle's if the k-th and the (k + 1)-th logit differ by more than
// 2^-8 of the largest. Otherwise every chosen logit must be that close to the k-th. Among keys with
// equal bytes, lower positions are chosen first.
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
  int32_t distinct = 0;  // distinct keys; 0: all differ
  bool alike = false;    // keys are nearly equal
};

std::string ToString(const IndexerCase& c);
// Cases whose index keys have one of `dims` elements each.
std::vector<IndexerCase> IndexerCases(int32_t count, const std::vector<int32_t>& dims);
// Cases with too many positions for the memory in which backends gather candidates, and with lists
// as long as DeepSeek V3.2's.
std::vector<IndexerCase> LongIndexerCases();
// A case with so many keys that each block of a GPU with 132 units has many of them.
IndexerCase ManyRowsIndexerCase();
// Limits of a backend that runs such cases.
kernels::BackendLimits IndexerLimits();

// One thread.
class IndexerWorkload {
 public:
  explicit IndexerWorkload(const IndexerCase& c);

  // Returns the lists, by row, that the backend chose in one launch with the rows [first, first +
  // rows). Also returns an error if the pages differ from earlier backends' pages, or if the
  // returned lists differ from the lists in place.
  absl::StatusOr<std::vector<std::vector<int32_t>>> Run(kernels::AttentionBackend& backend,
                                                        int32_t first, int32_t rows);
  // Checks all requirements of the case.
  absl::Status Check(kernels::AttentionBackend& backend);

 private:
  int32_t Visible(int32_t row) const { return c_.positions - c_.rows + row + 1; }
  int32_t Wanted(int32_t row) const { return std::min(Visible(row), c_.top_k); }
  absl::Status Launch(kernels::AttentionBackend& backend, int32_t first, int32_t rows,
                      const std::vector<int32_t>& begin, int32_t* list, int32_t* wanted);
  absl::Status CheckPages(kernels::AttentionBackend& backend);
  // Checks that the pages hold the sent values, to e4m3's accuracy.
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
  std::vector<double> stored_;               // keys as read from the pages
  std::vector<std::vector<double>> logits_;  // by row
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_WORKLOAD_H_
