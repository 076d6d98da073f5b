// Tests the GPU backend's page work on the fake runtime: a list takes few commands and keeps its
// order.
#include <memory>
#include <span>
#include <vector>

#include "kernels/hip/args/kernel_args.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::kernels::hip {
namespace {

class PagesTest : public BackendOnFakeTest {
 protected:
  static absl::Status Write(HipBackend& backend, std::span<const PageRange> ranges) {
    Launch launch;
    launch.pages = ranges;
    absl::Status s = backend.Submit(0, launch);
    return s.ok() ? backend.Wait(0).status() : s;
  }
};

// Ranges that share no bytes take one kernel together, however many they are. Each place where a
// range depends on an earlier one takes one more kernel.
TEST_F(PagesTest, AListOfPageRangesIsWrittenInItsOrder) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  const int32_t limit = Limits().page_ranges;
  std::vector<PageRange> ranges;
  for (int32_t i = 0; i <= limit; ++i) ranges.push_back({int64_t{i} * 256, 256});
  ASSERT_TRUE(AppendOnce(**backend).ok());
  int64_t launches = control_->launches;
  EXPECT_EQ(Write(**backend, ranges).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(Write(**backend, std::span(ranges).first(static_cast<size_t>(limit))).ok());
  EXPECT_EQ(control_->launches - launches, 1);
  EXPECT_EQ(ReadRows(**backend, 1), std::vector<Bf16>(576, 0));

  // The chain copies the row to a zeroed place that crosses an edge between chunks, zeroes the
  // source, and copies the row back without its last element. Places and lengths are odd.
  ASSERT_TRUE(AppendOnce(**backend).ok());
  constexpr int64_t kOdd = 3 * kMoveChunkBytes - 574;
  const PageRange chain[] = {{kOdd, 100000},  {kOdd, 1152, 0},        {0, 1152},
                             {0, 1151, kOdd}, {4096, 4096, 4096 * 8}, {1150, 2}};
  launches = control_->launches;
  ASSERT_TRUE(Write(**backend, chain).ok());
  EXPECT_EQ(control_->launches - launches, 5);
  const std::vector<Bf16> bytes = ReadRows(**backend, 1);
  EXPECT_EQ(bytes[0], 0x3f80);
  EXPECT_EQ(bytes[574], 0x3f80);
  EXPECT_EQ(bytes[575], 0);
  // All places of a range are one kernel, but each place counts as a range.
  launches = control_->launches;
  PageRange places{0, 2, PageRange::kZeros, limit, 4};
  ASSERT_TRUE(Write(**backend, {&places, 1}).ok());
  EXPECT_EQ(control_->launches - launches, 1);
  const std::vector<Bf16> rest = ReadRows(**backend, 1);
  EXPECT_EQ(rest[574], 0);
  EXPECT_EQ(rest[573], 0x3f80);
  ++places.count;
  EXPECT_EQ(Write(**backend, {&places, 1}).code(), absl::StatusCode::kResourceExhausted);
  const PageRange outside{(1 << 20) - 8, 16};
  EXPECT_EQ(Write(**backend, {&outside, 1}).code(), absl::StatusCode::kInvalidArgument);
}

// However often entries are named, a launch updates the table with one kernel and copies each entry
// at most once.
TEST_F(PagesTest, AListOfTableRangesIsOneKernel) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  BackendLimits limits = Limits();
  limits.page_table_entries = 1 << 16;
  ASSERT_TRUE((*backend)->Configure(limits).ok());
  const std::vector<uint32_t> entries(static_cast<size_t>(limits.page_table_entries));
  const std::vector<TableRange> all(static_cast<size_t>(limits.table_ranges) + 1,
                                    TableRange{0, limits.page_table_entries});
  const int64_t launches = control_->launches;
  Launch launch;
  launch.page_tables = entries;
  launch.table_changes = all;
  EXPECT_EQ((*backend)->Submit(0, launch).code(), absl::StatusCode::kResourceExhausted);
  launch.table_changes = std::span(all).subspan(1);
  ASSERT_TRUE((*backend)->Submit(0, launch).ok());
  ASSERT_TRUE((*backend)->Wait(0).ok());
  EXPECT_EQ(control_->launches - launches, 1);
}

}  // namespace
}  // namespace mla::kernels::hip
