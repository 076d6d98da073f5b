// Which bytes of moves a launch carries.
#include "scheduler/moves/page_mover.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kPart = kernels::kDigestPartBytes;

class PageMoverTest : public ::testing::Test {
 protected:
  PageMoverTest() {
    kvcache::KvCacheOptions options;
    options.bytes = 1 << 20;
    options.max_sequences = 4;
    options.max_pages_per_sequence = 4;
    tables_.resize(16);
    cache_ = kvcache::KvCache::Create(options, tables_).value();
    layout_ = cache_->AddLayout(kvcache::MakeLayout({.row_bytes = 32, .page_size = 4, .layers = 1}))
                  .value();
    mover_ = std::make_unique<PageMover>(cache_.get());
  }

  // Out of a group of its own; the bytes are nowhere, and not looked at.
  std::unique_ptr<PageMove> Add(int64_t bytes, kernels::PartDigest* digests) {
    auto move = std::make_unique<PageMove>();
    move->engine.entry = cache_->TakeToRestore(layout_, 1).entry;
    move->engine.tenant = 1;
    move->engine.transfers = {{0, bytes, nullptr, digests}};
    move->done = [this](const absl::Status& status) { answers_ += status.ok(); };
    mover_->Add(move.get());
    return move;
  }
  // The transfers of the next launch, which ends well.
  std::vector<kernels::PageTransfer> Launch() {
    Batch batch;
    mover_->Take(BatchPolicy(Limits(), 0), &batch);
    const std::vector<kernels::PageTransfer> reads = batch.page_reads;
    mover_->Finish(&batch, absl::OkStatus());
    return reads;
  }

  std::vector<uint32_t> tables_;
  std::unique_ptr<kvcache::KvCache> cache_;
  kvcache::LayoutId layout_ = -1;
  std::unique_ptr<PageMover> mover_;
  int answers_ = 0;
};

TEST_F(PageMoverTest, AMoveIsCutWhereALaunchIsFull) {
  const auto first = Add(PageMover::kLaunchBytes - 5000, nullptr);
  const auto second = Add(9000, nullptr);
  ASSERT_EQ(Launch().size(), 2u);
  EXPECT_EQ(answers_, 1);
  const auto rest = Launch();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].pool_offset, 5000);
  EXPECT_EQ(rest[0].bytes, 4000);
  EXPECT_EQ(answers_, 2);
  EXPECT_FALSE(mover_->waiting());
}

TEST_F(PageMoverTest, DigestsAreOfWholePartsWhereverAMoveIsCut) {
  std::vector<kernels::PartDigest> digests(3);
  const auto first = Add(PageMover::kLaunchBytes - 5000, nullptr);
  const auto second = Add(2 * kPart + 100, digests.data());
  const auto begun = Launch();
  ASSERT_EQ(begun.size(), 2u);
  EXPECT_EQ(begun[1].bytes, kPart);
  EXPECT_EQ(begun[1].digests, digests.data());
  const auto rest = Launch();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].pool_offset, kPart);
  EXPECT_EQ(rest[0].bytes, kPart + 100);
  EXPECT_EQ(rest[0].digests, digests.data() + 1);
  EXPECT_EQ(answers_, 2);
}

TEST_F(PageMoverTest, AMoveWithDigestsWaitsForALaunchThatHasRoomForAPart) {
  std::vector<kernels::PartDigest> digests(3);
  const auto first = Add(PageMover::kLaunchBytes - 4000, nullptr);
  const auto second = Add(2 * kPart + 100, digests.data());
  const auto third = Add(300, digests.data());  // less than a part, and all of it
  const auto begun = Launch();
  ASSERT_EQ(begun.size(), 2u);
  EXPECT_EQ(begun[1].bytes, 300);
  const auto rest = Launch();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].bytes, 2 * kPart + 100);
  EXPECT_EQ(answers_, 3);
  EXPECT_FALSE(mover_->waiting());
}

}  // namespace
}  // namespace mla::scheduler
