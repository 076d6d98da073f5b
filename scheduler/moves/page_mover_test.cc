// Tests which bytes of moves a launch carries, and when.
#include "scheduler/moves/page_mover.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace mla::scheduler {
namespace {

constexpr int64_t kPart = kernels::kDigestPartBytes;

constexpr int32_t kPages = 8;  // the most of a sequence
constexpr int32_t kPageSize = 4;

class PageMoverTest : public ::testing::Test {
 protected:
  PageMoverTest() {
    kvcache::KvCacheOptions options;
    options.bytes = 1 << 20;
    options.max_sequences = 4;
    options.max_pages_per_sequence = kPages;
    tables_.resize(size_t{4} * kPages);
    cache_ = kvcache::KvCache::Create(options, tables_).value();
    layout_ =
        cache_
            ->AddLayout(kvcache::MakeLayout({.row_bytes = 32, .page_size = kPageSize, .layers = 1}))
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
  // Groups that tenant 1 has written, and given back.
  void Dirty(int32_t groups) {
    const kvcache::SeqSlot slot = cache_->Open(layout_, 1).value();
    const kvcache::StepRows rows[] = {{slot, groups * kPageSize}};
    ASSERT_TRUE(cache_->Reserve(rows).ok());
    cache_->Release(slot);
  }
  // A group of tenant 2, which it got from tenant 1.
  uint32_t Reserve() {
    const kvcache::SeqSlot slot = cache_->Open(layout_, 2).value();
    const kvcache::StepRows rows[] = {{slot, kPageSize}};
    EXPECT_TRUE(cache_->Reserve(rows).ok());
    return cache_->group(slot, 0);
  }
  // Rows of an import into it.
  std::unique_ptr<PageMove> AddImport(uint32_t entry) {
    auto move = std::make_unique<PageMove>();
    move->in = true;
    move->engine.entry = entry;
    move->engine.tenant = 2;
    move->engine.ticket = cache_->work().last();
    const int64_t at = cache_->group_offset(entry);
    move->engine.transfers = {{at, kPageSize * 32, nullptr}};
    move->done = [this](const absl::Status& status) { answers_ += status.ok(); };
    mover_->Add(move.get());
    return move;
  }
  // Expects that the launch moves no rows into groups that it zeroes; ends it successfully.
  void End(Batch* batch) {
    for (const kernels::PageTransfer& write : batch->page_writes) {
      for (const kernels::PageRange& range : batch->pages.ranges()) {
        EXPECT_NE(write.pool_offset, range.target_offset);
      }
    }
    cache_->work().Acknowledge(&batch->pages);
    mover_->Finish(batch, absl::OkStatus());
    batch->Clear();
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

// A launch moves rows before it does page work, so zeroing in the same launch would erase them.
TEST_F(PageMoverTest, RowsWaitForTheLaunchAfterTheirZeroing) {
  Dirty(1);
  const auto move = AddImport(Reserve());
  const BatchPolicy policy(Limits(), 0);
  Batch batch;
  mover_->Take(policy, &batch);
  EXPECT_EQ(batch.pages.ranges().size(), 1u);
  EXPECT_TRUE(batch.page_writes.empty());
  End(&batch);
  mover_->Take(policy, &batch);
  EXPECT_EQ(batch.page_writes.size(), 1u);
  End(&batch);
  EXPECT_EQ(answers_, 1);
}

// All have their groups when rows of the first come, so the launch that zeroes the first one's
// group for them zeroes the others' too.
TEST_F(PageMoverTest, SeveralImportsWaitForTheirZeroingTogether) {
  Dirty(3);
  const uint32_t groups[] = {Reserve(), Reserve(), Reserve()};
  const auto first = AddImport(groups[0]), second = AddImport(groups[1]),
             third = AddImport(groups[2]);
  const BatchPolicy policy(Limits(), 0);
  Batch batch;
  mover_->Take(policy, &batch);
  EXPECT_EQ(batch.pages.ranges().size(), 3u);
  EXPECT_TRUE(batch.page_writes.empty());
  End(&batch);
  mover_->Take(policy, &batch);
  EXPECT_EQ(batch.page_writes.size(), 3u);
  End(&batch);
  EXPECT_EQ(answers_, 3);
}

// A step that has begun after the import waits for the import's zeroing, too.
TEST_F(PageMoverTest, AStepMayHaveTakenTheZeroingIntoTheLaunch) {
  Dirty(2);
  const auto move = AddImport(Reserve());
  const BatchPolicy policy(Limits(), 0);
  Batch batch;
  policy.TakePages(cache_->work(), 2, cache_->work().last(), batch);
  EXPECT_EQ(batch.pages.ranges().size(), 1u);
  // Rows that leave need no zeroing and go.
  const auto leaves = Add(300, nullptr);
  mover_->Take(policy, &batch);
  EXPECT_TRUE(batch.page_writes.empty());
  EXPECT_EQ(batch.page_reads.size(), 1u);
  End(&batch);
  mover_->Take(policy, &batch);
  EXPECT_EQ(batch.page_writes.size(), 1u);
  End(&batch);
  EXPECT_EQ(answers_, 2);
}

// The zeroing is in a launch before, which still runs: launches keep their order.
TEST_F(PageMoverTest, RowsGoWithTheNextLaunchWhileTheirZeroingRuns) {
  Dirty(1);
  const auto move = AddImport(Reserve());
  const BatchPolicy policy(Limits(), 0);
  Batch zeroes, writes;
  mover_->Take(policy, &zeroes);
  mover_->Take(policy, &writes);
  EXPECT_EQ(zeroes.pages.ranges().size(), 1u);
  EXPECT_EQ(writes.page_writes.size(), 1u);
  End(&zeroes);
  End(&writes);
  EXPECT_EQ(answers_, 1);
}

}  // namespace
}  // namespace mla::scheduler
