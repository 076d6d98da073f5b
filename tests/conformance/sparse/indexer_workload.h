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
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/dtype.h"
#include "kernels/launch_layout.h"

namespace mla::conformance {

struct IndexerCase {
  static constexpr int32_t kMostPositions = 9600;
  static constexpr int32_t kMostTopK = 2048;  // DeepSeek V3.2's

  uint64_t seed = 0;
  int32_t heads = 64, dim = 128, page_size = 64, positions = 1000, rows = 1, top_k = 64;
  kernels::DType dtype = kernels::DType::kBf16;
  int32_t distinct = 0;  // distinct keys; 0: all differ
  bool alike = false;    // keys are nearly equal
};

std::string ToString(const IndexerCase& c);
// Limits of a backend that runs such cases.
kernels::BackendLimits IndexerLimits();

// One thread.
class IndexerWorkload {
 public:
  // The pages and the page table of `before`, if not null, come before this workload's, so that one
  // launch may have both.
  explicit IndexerWorkload(const IndexerCase& c, const IndexerWorkload* before = nullptr);

  // Returns the lists, by row, that the backend chose in one launch with the rows [first, first +
  // rows). Also returns an error if the pages differ from earlier backends' pages, or if the
  // returned lists differ from the lists in place.
  absl::StatusOr<std::vector<std::vector<int32_t>>> Run(kernels::AttentionBackend& backend,
                                                        int32_t first, int32_t rows);
  // Checks all requirements of the case. Before the keys are appended, all bytes of their pages say
  // NaN, so codes and scales past the last key may not matter.
  absl::Status Check(kernels::AttentionBackend& backend);
  // Checks that rows get the same lists in a launch with the rows of `next`, which was made with
  // this workload before it. Both have been checked alone.
  absl::Status CheckWith(kernels::AttentionBackend& backend, IndexerWorkload& next);

 private:
  // The lists of the rows [first, first + rows) of a launch.
  struct Lists {
    int32_t first, rows;
    std::vector<int32_t> begin, list, wanted;
  };
  // Both as one launch takes them.
  struct Records {
    kernels::AppendRecord append{};
    kernels::SelectRecord select{};
  };
  int32_t Visible(int32_t row) const { return c_.positions - c_.rows + row + 1; }
  int32_t Wanted(int32_t row) const { return std::min(Visible(row), c_.top_k); }
  Lists EmptyLists(int32_t first, int32_t rows) const;
  absl::StatusOr<Records> Add(kernels::LaunchLayout& layout, Lists& lists) const;
  absl::Status Launch(kernels::AttentionBackend& backend, const kernels::LaunchLayout& layout,
                      std::span<const Records> records) const;
  // Returns the lists by row, or an error if the returned lists differ from the lists in place.
  absl::StatusOr<std::vector<std::vector<int32_t>>> ByRow(const Lists& lists) const;
  absl::Status Poison(kernels::AttentionBackend& backend) const;
  size_t pages() const { return table_.size() - first_entry_; }
  // Returns transfers of all own pages from or to `bytes`, page by page.
  std::vector<kernels::PageTransfer> Transfers(std::vector<std::byte>& bytes) const;
  absl::Status CheckPages(kernels::AttentionBackend& backend);
  // Checks that the pages hold the sent values, to e4m3's accuracy.
  absl::Status CheckKeys() const;
  absl::Status CheckList(int32_t row, const std::vector<int32_t>& list);
  double Stored(const std::vector<std::byte>& pages, int32_t position, int32_t i) const;
  double Key(int32_t position, int32_t i) const;
  double Logit(int32_t row, int32_t position) const;

  const IndexerCase c_;
  std::mt19937_64 random_;
  int64_t page_bytes_ = 0, end_granule_ = 0;
  std::vector<uint32_t> table_;  // of `before` as well
  const size_t first_entry_;
  std::vector<float> keys_, queries_, weights_;
  std::vector<std::byte> sent_keys_, inputs_;
  std::vector<double> stored_;               // keys as read from the pages
  std::vector<std::vector<double>> logits_;  // by row
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_SPARSE_INDEXER_WORKLOAD_H_
