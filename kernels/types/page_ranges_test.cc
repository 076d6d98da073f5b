#include "kernels/types/page_ranges.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

PageRange Copy(int64_t from, int64_t to, int64_t bytes) { return {to, bytes, from}; }
PageRange Zero(int64_t at, int64_t bytes) { return {at, bytes}; }

size_t FirstRun(const std::vector<PageRange>& ranges) {
  PageRangeRuns runs;
  runs.Reserve(ranges.size());
  return runs.Next(ranges);
}

TEST(PageRangeRunsTest, EndsWhereARangeMeetsAnEarlierOne) {
  EXPECT_EQ(FirstRun({}), 0u);
  EXPECT_EQ(FirstRun({Zero(0, 10), Zero(10, 10), Copy(20, 30, 10), Copy(20, 40, 10)}), 4u);
  EXPECT_EQ(FirstRun({Zero(0, 10), Zero(9, 10)}), 1u) << "written twice";
  EXPECT_EQ(FirstRun({Copy(0, 10, 10), Copy(10, 20, 10)}), 1u) << "read after it was written";
  EXPECT_EQ(FirstRun({Copy(10, 20, 10), Zero(10, 10)}), 1u) << "written after it was read";
  EXPECT_EQ(FirstRun({Copy(10, 20, 10), Copy(0, 30, 10), Zero(5, 1), Zero(50, 1)}), 2u);
  EXPECT_EQ(FirstRun({Zero(0, 100), Zero(40, 0), Copy(50, 60, 0)}), 3u) << "no bytes";
}

// A list carried out run by run, each run in any order, has the effect of the list in order.
TEST(PageRangeRunsTest, RunsInAnyOrderInsideAreTheListInOrder) {
  std::mt19937 random(7);
  const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  PageRangeRuns runs;
  runs.Reserve(64);
  size_t longest = 0, most_runs = 0;
  for (int round = 0; round < 3000; ++round) {
    const int64_t pool = 8 << below(8);
    std::vector<PageRange> ranges(static_cast<size_t>(below(64)));
    for (PageRange& r : ranges) {
      r.bytes = below(5);
      r.target_offset = below(pool - 4);
      r.source_offset = below(pool - 4);
      r.stride = r.bytes + below(3);
      const int64_t last = std::max(r.target_offset, r.source_offset);
      if (last + r.stride + r.bytes <= pool && below(3) == 0) r.count = 2;
      const bool overlaps = r.source_offset < r.target_offset + r.extent() &&
                            r.target_offset < r.source_offset + r.extent();
      if (overlaps || below(2) == 0) r.source_offset = PageRange::kZeros;
    }
    std::vector<int> expected(static_cast<size_t>(pool));
    for (int& byte : expected) byte = static_cast<int>(below(1 << 20)) + 1;
    std::vector<int> actual = expected;
    const auto apply = [](const PageRange& range, std::vector<int>& bytes) {
      for (int32_t place = 0; place < range.count; ++place) {
        const PageRange r = range.place(place);
        for (int64_t i = 0; i < r.bytes; ++i) {
          bytes[r.target_offset + i] = r.zeroes() ? 0 : bytes[r.source_offset + i];
        }
      }
    };
    for (const PageRange& r : ranges) apply(r, expected);
    std::span<const PageRange> remaining = ranges;
    size_t count = 0;
    for (; !remaining.empty(); ++count) {
      const size_t n = runs.Next(remaining);
      ASSERT_GE(n, 1u);
      std::vector<PageRange> run(remaining.begin(), remaining.begin() + static_cast<ptrdiff_t>(n));
      std::shuffle(run.begin(), run.end(), random);
      for (const PageRange& r : run) apply(r, actual);
      remaining = remaining.subspan(n);
      longest = std::max(longest, n);
    }
    most_runs = std::max(most_runs, count);
    ASSERT_EQ(actual, expected) << "round " << round;
  }
  EXPECT_GT(longest, 10u);
  EXPECT_GT(most_runs, 10u);
}

TEST(CheckPageRangesTest, NamesWhatLeavesThePoolOrOverlapsItself) {
  BackendLimits limits;
  limits.kv_pool_bytes = 100;
  limits.page_ranges = 3;
  const auto code = [&limits](const PageRange& r) {
    const std::vector<PageRange> list = {Zero(0, 1), r};
    return CheckPageRanges(list, limits).code();
  };
  EXPECT_EQ(code(Zero(0, 100)), absl::StatusCode::kOk);
  EXPECT_EQ(code(Zero(100, 0)), absl::StatusCode::kOk);
  EXPECT_EQ(code(Copy(0, 50, 50)), absl::StatusCode::kOk);
  for (const PageRange& r :
       {Zero(0, 101), Zero(99, 2), Zero(-1, 1), Zero(0, -1), Zero(INT64_MAX, 1), Zero(1, INT64_MAX),
        Copy(51, 0, 50), Copy(-2, 50, 1), Copy(10, 19, 10), Copy(19, 10, 10), Copy(5, 5, 1)}) {
    EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument) << r.target_offset << " " << r.bytes;
  }
  EXPECT_EQ(code({0, 10, 50, 5, 10}), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(code({0, 10, 50, 2, 40}), absl::StatusCode::kOk);
  for (const PageRange& r : std::vector<PageRange>{{0, 10, 50, 2, 41},
                                                   {0, 10, 50, 2, 9},
                                                   {0, 10, 50, 0, 10},
                                                   {0, 10, 50, 2, -10},
                                                   {0, 10, 20, 2, 30},
                                                   {0, 10, PageRange::kZeros, 2, INT64_MAX}}) {
    EXPECT_EQ(code(r), absl::StatusCode::kInvalidArgument) << r.count << " x " << r.stride;
  }
  const std::vector<PageRange> list(4, Zero(0, 1));
  EXPECT_TRUE(CheckPageRanges({list.data(), 3}, limits).ok());
  EXPECT_EQ(CheckPageRanges(list, limits).message(), "page ranges of a launch: 4 wanted, limit 3");
}

TEST(CheckPageTransfersTest, NamesWhatLeavesThePool) {
  BackendLimits limits;
  limits.kv_pool_bytes = 100;
  limits.page_ranges = 2;
  const auto check = [&limits](std::vector<PageTransfer> transfers) {
    return CheckPageTransfers("page_reads", transfers, limits);
  };
  EXPECT_TRUE(check({{0, 100, nullptr}, {100, 0, nullptr}}).ok());
  EXPECT_EQ(check({{0, 0, nullptr}, {96, 5, nullptr}}).message(),
            "page_reads[1]: 5 bytes at 96, limit 100");
  EXPECT_FALSE(check({{-1, 1, nullptr}}).ok());
  EXPECT_FALSE(check({{0, -1, nullptr}}).ok());
  EXPECT_EQ(check(std::vector<PageTransfer>(3)).code(), absl::StatusCode::kResourceExhausted);
}

TEST(CheckPageTransfersTest, DigestsAreOfGranulesAndBounded) {
  BackendLimits limits;
  limits.kv_pool_bytes = 4 * kDigestPartBytes;
  limits.digest_parts = 2;
  PartDigest digests[4];
  const auto check = [&](int64_t at, int64_t bytes) {
    const PageTransfer transfer{at, bytes, nullptr, digests};
    return CheckPageTransfers("page_reads", {&transfer, 1}, limits);
  };
  EXPECT_TRUE(check(kPageGranuleBytes, 2 * kDigestPartBytes).ok());
  EXPECT_EQ(check(0, 2 * kDigestPartBytes + kPageGranuleBytes).message(),
            "digests of a launch: 3 wanted, limit 2");
  EXPECT_EQ(check(0, 300).message(),
            "page_reads[0]: 300 bytes at 0, with digests multiples of 256");
  EXPECT_EQ(check(1, 256).code(), absl::StatusCode::kInvalidArgument);
}

TEST(CheckTableRangesTest, NamesWhatLeavesTheTable) {
  BackendLimits limits;
  limits.page_table_entries = 10;
  limits.table_ranges = 2;
  const auto ok = [&limits](int64_t first, int64_t count) {
    const TableRange range{first, count};
    return CheckTableRanges({&range, 1}, limits, 20).ok();
  };
  EXPECT_TRUE(ok(0, 10) && ok(10, 0) && ok(9, 1));
  EXPECT_FALSE(ok(-1, 1) || ok(0, -1) || ok(9, 2) || ok(INT64_MAX, 2));
  const std::vector<TableRange> list(3, TableRange{0, 1});
  EXPECT_FALSE(CheckTableRanges({list.data(), 1}, limits, 0).ok());  // a table of no entries
  EXPECT_EQ(CheckTableRanges(list, limits, 20).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace mla::kernels
