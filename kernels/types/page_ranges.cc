#include "kernels/types/page_ranges.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels {
namespace {

bool Inside(int64_t offset, int64_t bytes, int64_t pool_bytes) {
  return offset >= 0 && bytes >= 0 && bytes <= pool_bytes && offset <= pool_bytes - bytes;
}

// Returns true if the places of a range lie in bounds that let its extent be computed.
bool WellFormed(const PageRange& r, int64_t pool_bytes) {
  if (r.bytes < 0 || r.bytes > pool_bytes || r.count < 1) return false;
  if (r.count == 1) return true;
  return r.stride >= r.bytes && r.stride <= pool_bytes / r.count;
}

absl::Status CheckRoom(const char* what, int64_t wanted, int64_t most) {
  if (wanted <= most) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of a launch: ", wanted, " wanted, limit ", most));
}

}  // namespace

absl::Status CheckPageRanges(std::span<const PageRange> ranges, const BackendLimits& limits) {
  const int64_t pool_bytes = limits.kv_pool_bytes;
  int64_t places = 0;
  for (const PageRange& r : ranges) places += std::max(r.count, 1);
  MLA_RETURN_IF_ERROR(CheckRoom("page ranges", places, limits.page_ranges));
  for (size_t i = 0; i < ranges.size(); ++i) {
    const PageRange& r = ranges[i];
    const bool copies = !r.zeroes();
    const int64_t extent = WellFormed(r, pool_bytes) ? r.extent() : -1;
    if (!Inside(r.target_offset, extent, pool_bytes) ||
        (copies && !Inside(r.source_offset, extent, pool_bytes))) {
      return absl::InvalidArgumentError(
          absl::StrCat("pages.ranges[", i, "]: ", r.bytes, " bytes at ", r.target_offset,
                       copies ? absl::StrCat(" from ", r.source_offset) : "",
                       r.count == 1 ? "" : absl::StrCat(", ", r.count, " times every ", r.stride),
                       ", limit ", pool_bytes));
    }
    if (copies && r.source_offset < r.target_offset + extent &&
        r.target_offset < r.source_offset + extent && r.bytes > 0) {
      return absl::InvalidArgumentError(absl::StrCat("pages.ranges[", i, "]: ", r.bytes,
                                                     " bytes at ", r.target_offset,
                                                     " overlap their source ", r.source_offset));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPageTransfers(const char* part, std::span<const PageTransfer> transfers,
                                const BackendLimits& limits) {
  MLA_RETURN_IF_ERROR(CheckRoom(part, std::ssize(transfers), limits.page_ranges));
  int64_t parts = 0;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const PageTransfer& t = transfers[i];
    if (!Inside(t.pool_offset, t.bytes, limits.kv_pool_bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(part, "[", i, "]: ", t.bytes, " bytes at ",
                                                     t.pool_offset, ", limit ",
                                                     limits.kv_pool_bytes));
    }
    if (t.digests == nullptr) continue;
    if ((t.pool_offset | t.bytes) % kPageGranuleBytes != 0) {
      return absl::InvalidArgumentError(absl::StrCat(part, "[", i, "]: ", t.bytes, " bytes at ",
                                                     t.pool_offset, ", with digests multiples of ",
                                                     kPageGranuleBytes));
    }
    parts += DigestParts(t.bytes);
  }
  return CheckRoom("digests", parts, limits.digest_parts);
}

absl::Status CheckTableRanges(std::span<const TableRange> ranges, const BackendLimits& limits,
                              size_t entries) {
  MLA_RETURN_IF_ERROR(CheckRoom("table ranges", std::ssize(ranges), limits.table_ranges));
  const int64_t limit = std::min(limits.page_table_entries, static_cast<int64_t>(entries));
  for (const TableRange& r : ranges) {
    if (Inside(r.first, r.count, limit)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("page table entries: ", r.count, " from ", r.first, ", limit ", limit));
  }
  return absl::OkStatus();
}

bool PageRangeRuns::Independent(std::span<const PageRange> ranges) {
  pieces_.clear();
  for (const PageRange& r : ranges) {
    if (r.bytes == 0) continue;
    pieces_.push_back({r.target_offset, r.target_offset + r.extent(), true});
    if (!r.zeroes()) pieces_.push_back({r.source_offset, r.source_offset + r.extent(), false});
  }
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  int64_t read_to = 0, written_to = 0;
  for (const Piece& piece : pieces_) {
    if (piece.begin < written_to || (piece.written && piece.begin < read_to)) return false;
    int64_t& reached = piece.written ? written_to : read_to;
    reached = std::max(reached, piece.end);
  }
  return true;
}

size_t PageRangeRuns::Next(std::span<const PageRange> ranges) {
  if (ranges.size() <= 1 || Independent(ranges)) return ranges.size();
  // Doubling, then bisection: a list of many short runs costs a few ranges at each run, and a list
  // of few long runs costs few rounds over all of it.
  size_t good = 1, bad = 2;
  while (bad < ranges.size() && Independent(ranges.first(bad))) {
    good = bad;
    bad *= 2;
  }
  bad = std::min(bad, ranges.size());
  while (bad - good > 1) {
    const size_t middle = good + (bad - good) / 2;
    (Independent(ranges.first(middle)) ? good : bad) = middle;
  }
  return good;
}

}  // namespace mla::kernels
