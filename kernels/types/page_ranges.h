// Checks and ordering of page ranges (Launch::pages), shared by the backends.
//
// A list takes effect as if its ranges were carried out one after another. Most lists name no byte
// twice and may run in any order; PageRangeRuns cuts a list into runs: each run depends on earlier
// ones only, so a backend carries out the ranges of a run in parallel.
#ifndef MLA_KERNELS_TYPES_PAGE_RANGES_H_
#define MLA_KERNELS_TYPES_PAGE_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types/backend_limits.h"
#include "kernels/types/launch.h"

namespace mla::kernels {

// INVALID_ARGUMENT names the first range that leaves the pool, or whose source overlaps its target;
// RESOURCE_EXHAUSTED when there are more than limits.page_ranges places.
absl::Status CheckPageRanges(std::span<const PageRange> ranges, const BackendLimits& limits);
// As CheckPageRanges, for Launch::page_writes and page_reads; `part` names the list in the message.
absl::Status CheckPageTransfers(const char* part, std::span<const PageTransfer> transfers,
                                const BackendLimits& limits);
// As CheckPageRanges, for Launch::table_changes and limits.table_ranges; the table has `entries`
// entries.
absl::Status CheckTableRanges(std::span<const TableRange> ranges, const BackendLimits& limits,
                              size_t entries);

// Owns only scratch memory. Only one thread at a time may use it.
class PageRangeRuns {
 public:
  // Holds lists of at most `ranges` ranges. Allocates; Next does not.
  void Reserve(size_t ranges) { pieces_.reserve(2 * ranges); }
  // Returns the length of the longest head of the list whose ranges may be carried out together: no
  // byte in the extent that one of them writes is in an extent that another reads or writes. At
  // least 1 unless the list is empty.
  size_t Next(std::span<const PageRange> ranges);

 private:
  struct Piece {
    int64_t begin, end;
    bool written;
  };
  bool Independent(std::span<const PageRange> ranges);

  std::vector<Piece> pieces_;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_PAGE_RANGES_H_
