// Page work of the GPU backend on the fake runtime: lists in few commands, in their order.
#include <memory>
#include <vector>

#include "kernels/hip/common/kernel_args.h"
#include "tests/fake_hip/backend_fixture.h"

namespace mla::gpu {
namespace {

using PagesTest = BackendOnFakeTest;

// Ranges that share no bytes take one kernel together, however many they are; each place where the
// list waits for itself one more.
TEST_F(PagesTest, AListOfPageRangesIsWrittenInItsOrder) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  ASSERT_TRUE((*backend)->Configure(Limits()).ok());
  const int32_t most = Limits().page_ranges;
  std::vector<kernels::PageRange> ranges;
  for (int32_t i = 0; i < most; ++i) ranges.push_back({int64_t{i} * 256, 256});
  ASSERT_TRUE(AppendOnce(**backend).ok());
  int64_t launches = control_->launches;
  ASSERT_TRUE((*backend)->BeginLaunch(0).ok());
  ASSERT_TRUE((*backend)->WritePages(0, ranges).ok());
  EXPECT_EQ((*backend)->WritePages(0, {ranges.data(), 1}).code(),
            absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE((*backend)->Submit(0).ok());
  ASSERT_TRUE((*backend)->Wait(0).ok());
  EXPECT_EQ(control_->launches - launches, 1);
  const kernels::AppendRecord row = Append(nullptr, 1);
  std::vector<kernels::Bf16> bytes(576, 7);
  ASSERT_TRUE((*backend)->ReadKv(row, bytes.data()).ok());
  EXPECT_EQ(bytes, std::vector<kernels::Bf16>(576, 0));

  // The row, to a place that is zeroed first, over an edge of chunks, and back over what was zeroed
  // meanwhile, without its last element. Odd places and lengths on the way.
  ASSERT_TRUE(AppendOnce(**backend).ok());
  constexpr int64_t kOdd = 3 * kMoveChunkBytes - 574;
  const kernels::PageRange chain[] = {{kOdd, 100000},  {kOdd, 1152, 0},        {0, 1152},
                                      {0, 1151, kOdd}, {4096, 4096, 4096 * 8}, {1150, 2}};
  launches = control_->launches;
  ASSERT_TRUE((*backend)->BeginLaunch(0).ok());
  ASSERT_TRUE((*backend)->WritePages(0, chain).ok());
  ASSERT_TRUE((*backend)->Submit(0).ok());
  ASSERT_TRUE((*backend)->Wait(0).ok());
  EXPECT_EQ(control_->launches - launches, 5);
  ASSERT_TRUE((*backend)->ReadKv(row, bytes.data()).ok());
  EXPECT_EQ(bytes[0], 0x3f80);
  EXPECT_EQ(bytes[574], 0x3f80);
  EXPECT_EQ(bytes[575], 0);
  const kernels::PageRange outside{(1 << 20) - 8, 16};
  ASSERT_TRUE((*backend)->BeginLaunch(0).ok());
  EXPECT_EQ((*backend)->WritePages(0, {&outside, 1}).code(), absl::StatusCode::kInvalidArgument);
}

// However often entries are named, a launch shows the table with one kernel and its own size.
TEST_F(PagesTest, AListOfTableRangesIsOneKernel) {
  auto backend = HipBackend::Create(Options());
  ASSERT_TRUE(backend.ok()) << backend.status();
  kernels::BackendLimits limits = Limits();
  limits.page_table_entries = 1 << 16;
  ASSERT_TRUE((*backend)->Configure(limits).ok());
  const std::vector<kernels::TableRange> all(static_cast<size_t>(limits.table_ranges),
                                             kernels::TableRange{0, limits.page_table_entries});
  const int64_t launches = control_->launches;
  ASSERT_TRUE((*backend)->BeginLaunch(0).ok());
  ASSERT_TRUE((*backend)->PublishPageTable(0, all).ok());
  EXPECT_EQ((*backend)->PublishPageTable(0, {all.data(), 1}).code(),
            absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE((*backend)->Submit(0).ok());
  ASSERT_TRUE((*backend)->Wait(0).ok());
  EXPECT_EQ(control_->launches - launches, 1);
}

}  // namespace
}  // namespace mla::gpu
