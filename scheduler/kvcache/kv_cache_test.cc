#include "scheduler/kvcache/kv_cache.h"

#include <algorithm>
#include <vector>

#include "kernels/testing/allocation_counter.h"
#include "scheduler/kvcache/kv_cache_fixture.h"

namespace mla::kvcache {
namespace {

TEST_F(KvCacheTest, FreedGroupsAreCountedByReasonAndTheirLivesSampled) {
  Make(16);
  int64_t now = 0;
  std::vector<int64_t> lives;
  cache_->WatchLifetimes([&now] { return now; }, [&lives](int64_t ns) { lives.push_back(ns); });
  const auto freed = [this](Freed why) { return cache_->stats().freed[static_cast<size_t>(why)]; };
  const SeqSlot s = Open();
  const SeqSlot other = Open();
  ASSERT_TRUE(Reserve(s, 40).ok());  // ten groups of four rows
  cache_->Commit(s, 31);
  EXPECT_EQ(cache_->stats().allocations, 10u);
  EXPECT_EQ(freed(Freed::kUncommitted), 2u);
  ASSERT_TRUE(cache_->Truncate(s, 4).ok());
  EXPECT_EQ(freed(Freed::kTruncated), 7u);
  Append(other, 28);
  now = 500;
  // A refused reservation takes nothing, and gives nothing back.
  EXPECT_FALSE(Reserve(other, 36).ok());
  EXPECT_EQ(cache_->stats().allocations, 17u);
  EXPECT_TRUE(lives.empty());
  cache_->Release(other, Freed::kExpired);
  EXPECT_EQ(freed(Freed::kExpired), 7u);
  EXPECT_EQ(lives, std::vector<int64_t>{500}) << "the sixteenth group to come back";
  cache_->Release(s);
  EXPECT_EQ(freed(Freed::kReleased), 1u);
  EXPECT_EQ(cache_->stats().groups_used, 0);
}

TEST_F(KvCacheTest, RowsTakePagesAsTheyComeAndGiveThemBack) {
  Make(8);
  const SeqSlot s = Open();
  EXPECT_EQ(cache_->stats().groups_used, 0);
  Append(s, 5);
  EXPECT_EQ(cache_->length(s), 5);
  EXPECT_EQ(cache_->stats().groups_used, 2);
  Append(s, 3);
  EXPECT_TRUE(carried_.tables.empty()) << "no new page, nothing to publish";
  EXPECT_EQ(cache_->free_groups(layout_), 6);
  ASSERT_TRUE(cache_->Truncate(s, 4).ok());
  EXPECT_EQ(cache_->stats().groups_used, 1);
  cache_->Release(s);
  EXPECT_EQ(cache_->stats().groups_used, 0);
  EXPECT_EQ(cache_->stats().sequences, 0);
  EXPECT_EQ(cache_->free_groups(layout_), 8);
}

TEST_F(KvCacheTest, TableRangesNameWhatChanged) {
  Make(8);
  Open();
  const SeqSlot s = Open();
  ASSERT_TRUE(Reserve(s, 6).ok());
  ASSERT_EQ(carried_.tables.size(), 1u);
  EXPECT_EQ(carried_.tables[0].first, 16);
  EXPECT_EQ(carried_.tables[0].count, 2);
  cache_->Commit(s, 1);  // the second page goes back
  EXPECT_EQ(cache_->stats().groups_used, 1);
  ASSERT_TRUE(Reserve(s, 4).ok());
  ASSERT_EQ(carried_.tables.size(), 1u);
  EXPECT_EQ(carried_.tables[0].first, 17);
  EXPECT_EQ(carried_.tables[0].count, 1);
}

TEST_F(KvCacheTest, ForkSharesAndWritingCopies) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 6);
  const SeqSlot child = cache_->Fork(parent, 5).value();
  EXPECT_EQ(cache_->length(child), 5);
  EXPECT_EQ(Table(parent, 2), Table(child, 2));
  EXPECT_EQ(cache_->stats().groups_used, 2);
  EXPECT_EQ(cache_->stats().groups_shared, 2);
  const uint32_t shared = Table(parent, 2)[1];
  ASSERT_TRUE(Reserve(child, 1).ok());
  ASSERT_EQ(carried_.copies.size(), 2u) << "layers";
  EXPECT_EQ(carried_.copies[0].source_offset, int64_t{shared} * kernels::kPageGranuleBytes);
  EXPECT_EQ(carried_.copies[0].bytes, 32) << "the one row that the child has of the page";
  EXPECT_EQ(carried_.copies[1].source_offset - carried_.copies[0].source_offset, 4 * 32);
  EXPECT_EQ(cache_->stats().bytes_copied, 2u * 32);
  ASSERT_EQ(carried_.tables.size(), 1u) << "a child publishes its whole table";
  EXPECT_EQ(carried_.tables[0].count, 2);
  cache_->Commit(child, 1);
  EXPECT_EQ(Table(parent, 2)[1], shared);
  EXPECT_NE(Table(child, 2)[1], shared);
  EXPECT_EQ(cache_->stats().copies_on_write, 1u);
  Append(parent, 1);
  EXPECT_TRUE(carried_.copies.empty()) << "no other sequence holds the page";
}

TEST_F(KvCacheTest, ForkAtAPageBorderNeverCopies) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 8);
  const SeqSlot child = cache_->Fork(parent, 4).value();
  EXPECT_EQ(cache_->stats().groups_shared, 1);
  Append(child, 1);
  EXPECT_TRUE(carried_.copies.empty());
}

TEST_F(KvCacheTest, StepIsReservedAsAWholeOrNotAtAll) {
  Make(4);
  const SeqSlot a = Open();
  const SeqSlot b = Open();
  Append(a, 6);
  const SeqSlot fork = cache_->Fork(a, 6).value();
  const auto before = tables_;
  const StepRows step[] = {{a, 1}, {b, 4}, {fork, 4}};  // copy, page, page: one too many
  const absl::Status refused = ReserveStep(step);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("2 are free"), std::string::npos) << refused;
  EXPECT_TRUE(carried_.copies.empty() && carried_.scrubs.empty() && carried_.tables.empty());
  EXPECT_EQ(Table(a, 2), std::vector<uint32_t>(before.begin(), before.begin() + 2));
  EXPECT_FALSE(cache_->has_reservation(a));
  EXPECT_EQ(cache_->stats().groups_shared, 2);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  const StepRows fits[] = {{a, 1}, {b, 4}};
  EXPECT_TRUE(ReserveStep(fits).ok());
}

TEST_F(KvCacheTest, ReservationRefusesEverythingElse) {
  Make(8);
  const SeqSlot s = Open();
  ASSERT_TRUE(Reserve(s, 2).ok());
  EXPECT_EQ(cache_->reserved(s), 2);
  EXPECT_EQ(Reserve(s, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache_->Fork(s, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache_->Truncate(s, 0).code(), absl::StatusCode::kFailedPrecondition);
  cache_->Rollback(s);
  EXPECT_EQ(cache_->stats().groups_used, 0);
  EXPECT_EQ(cache_->length(s), 0);
  const StepRows twice[] = {{s, 1}, {s, 1}};
  EXPECT_EQ(ReserveStep(twice).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(cache_->has_reservation(s));
}

TEST_F(KvCacheTest, ScrubsOnlyWhenTheTenantChanges) {
  Make(1);
  SeqSlot s = Open(1);
  ASSERT_TRUE(Reserve(s, 1).ok());
  EXPECT_TRUE(carried_.scrubs.empty()) << "fresh memory is clean";
  cache_->Release(s);
  s = Open(1);
  ASSERT_TRUE(Reserve(s, 1).ok());
  EXPECT_TRUE(carried_.scrubs.empty()) << "it was its own";
  cache_->Release(s);
  s = Open(2);
  ASSERT_TRUE(Reserve(s, 1).ok());
  ASSERT_EQ(carried_.scrubs.size(), 1u);
  EXPECT_EQ(carried_.scrubs[0].target_offset, 0);
  EXPECT_EQ(carried_.scrubs[0].bytes, kSmall.group_bytes());
  EXPECT_EQ(cache_->stats().scrubs, 1u);
}

TEST_F(KvCacheTest, RefusedReservationLeavesTheMarks) {
  Make(1);
  SeqSlot s = Open(1);
  Append(s, 1);
  cache_->Release(s);
  s = Open(2);
  EXPECT_FALSE(Reserve(s, 8).ok());
  EXPECT_TRUE(Reserve(s, 4).ok());
  EXPECT_EQ(carried_.scrubs.size(), 1u) << "the refused one scrubbed nothing";
}

TEST_F(KvCacheTest, MarksFollowTheBytesAcrossLayouts) {
  Make(8, 4);
  const GroupLayout wide =
      MakeLayout({.row_bytes = 64, .page_size = 8, .layers = 1});  // two granules
  const LayoutId other = cache_->AddLayout(wide).value();
  SeqSlot s = Open(1);
  Append(s, 1);
  cache_->Release(s);
  s = cache_->Open(other, 2).value();
  ASSERT_TRUE(Reserve(s, 8 * 4).ok());  // all of the pool
  EXPECT_GE(carried_.scrubs.size(), 1u) << "the next owner of the first slab gets tenant 1's bytes";
  EXPECT_EQ(carried_.scrubs[0].bytes, wide.group_bytes());
  cache_->Release(s);
  s = cache_->Open(other, 2).value();
  ASSERT_TRUE(Reserve(s, 8 * 4).ok());
  EXPECT_TRUE(carried_.scrubs.empty());
}

TEST_F(KvCacheTest, LayoutsShareTheBudgetBySlabs) {
  Make(8, 4);
  const LayoutId other = cache_->AddLayout(kSmall).value();
  const SeqSlot a = Open();
  Append(a, 1);
  EXPECT_EQ(cache_->free_groups(layout_), 7);
  EXPECT_EQ(cache_->free_groups(other), 4);
  const SeqSlot b = cache_->Open(other, 1).value();
  Append(b, 4 * 4);
  EXPECT_EQ(cache_->free_groups(other), 0);
  EXPECT_EQ(cache_->free_groups(layout_), 3);
  EXPECT_EQ(cache_->RemoveLayout(other).code(), absl::StatusCode::kFailedPrecondition);
  cache_->Release(b);
  EXPECT_TRUE(cache_->RemoveLayout(other).ok());
  EXPECT_EQ(cache_->free_groups(layout_), 7);
  EXPECT_EQ(cache_->AddLayout(kSmall).value(), other) << "ids are reused";
}

TEST_F(KvCacheTest, GroupLargerThanASlabTakesNeighbours) {
  Make(7, 2);
  const GroupLayout huge =
      MakeLayout({.row_bytes = 32 * 5, .page_size = 4, .layers = 2});  // five granules
  const LayoutId other = cache_->AddLayout(huge).value();
  EXPECT_EQ(cache_->free_groups(other), 1);
  const SeqSlot s = cache_->Open(other, 1).value();
  Append(s, 4);
  EXPECT_FALSE(Reserve(s, 1).ok());
  EXPECT_EQ(cache_->free_groups(layout_), 1) << "the short slab at the end";
  EXPECT_EQ(cache_->CheckInvariants(), "");
  cache_->Release(s);
  EXPECT_EQ(cache_->free_groups(layout_), 7);
}

// Steps of operations in a pool with half of its groups in use.
std::vector<uint64_t> Steps(int64_t groups) {
  constexpr int32_t kPages = 16, kRows = kPages * 4 - 2;
  const auto sequences = static_cast<int32_t>(groups / kPages / 2);
  std::vector<uint32_t> tables(static_cast<size_t>(sequences + 4) * kPages);
  auto cache = KvCache::Create({.bytes = groups * kSmall.group_bytes(),
                                .max_sequences = sequences + 4,
                                .max_pages_per_sequence = kPages},
                               tables)
                   .value();
  const LayoutId layout = cache->AddLayout(kSmall).value();
  std::vector<uint64_t> steps;
  const auto append = [&](SeqSlot sequence, int32_t rows) {
    const StepRows step[] = {{sequence, rows}};
    ASSERT_TRUE(cache->Reserve(step).ok());
    WorkRoom room{.places = INT64_MAX, .bytes = INT64_MAX};
    LaunchWork work;
    for (const int32_t layer : {0, 1}) {
      cache->work().TakeLayer(cache->copied_group(sequence), layer, &room, &work);
    }
    cache->work().Acknowledge(&work);
    cache->Commit(sequence, rows);
  };
  const auto count = [&](const auto& call) {
    const uint64_t before = cache->steps();
    call();
    steps.push_back(cache->steps() - before);
  };
  SeqSlot last = -1;
  for (int32_t s = 0; s < sequences; ++s) {
    last = cache->Open(layout, 1).value();
    append(last, kRows);
  }
  SeqSlot fork = -1;
  count([&] { append(last, 1); });
  count([&] { fork = cache->Fork(last, kRows).value(); });
  count([&] { append(fork, 1); });  // the first group of a slab
  count([&] { EXPECT_TRUE(cache->Truncate(fork, 8).ok()); });
  count([&] { append(fork, 4); });
  count([&] { cache->Release(fork); });
  // Tenant 2 takes a group of another size out of slabs that tenant 1 has used in part.
  cache->Release(last);
  const GroupLayout wide = MakeLayout({.row_bytes = 64, .page_size = 8, .layers = 1});
  const LayoutId other = cache->AddLayout(wide).value();
  const SeqSlot foreign = cache->Open(other, 2).value();
  count([&] { append(foreign, 1); });
  return steps;
}

TEST_F(KvCacheTest, NoOperationIsLinearInGroups) {
  const std::vector<uint64_t> small = Steps(1 << 10), large = Steps(1 << 16);
  EXPECT_EQ(small.size(), 7u);
  EXPECT_EQ(small, large);
}

TEST_F(KvCacheTest, OffsetsPastFourGibAndEntriesPastTwoToTheTwentyFour) {
  // Accounting only: no such memory exists here.
  const GroupLayout real = MakeLayout({.row_bytes = 1152, .page_size = 64, .layers = 61});
  const int64_t bytes = int64_t{1} << 40;
  tables_.assign(4 * 100'000, 0);
  cache_ = KvCache::Create({.bytes = bytes, .max_sequences = 4, .max_pages_per_sequence = 100'000},
                           tables_)
               .value();
  layout_ = cache_->AddLayout(real).value();
  const int64_t groups = cache_->free_groups(layout_);
  EXPECT_GE(groups, bytes / real.group_bytes() - 2);
  const SeqSlot s = Open(1);
  for (int64_t remaining = groups; remaining > 0;) {
    const auto rows = static_cast<int32_t>(std::min<int64_t>(remaining, 100'000)) * 64;
    const SeqSlot piece = remaining == groups ? s : Open(1);
    Append(piece, rows);
    remaining -= rows / 64;
  }
  EXPECT_EQ(cache_->free_groups(layout_), 0);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  uint32_t largest = 0;
  for (const uint32_t entry : tables_) largest = std::max(largest, entry);
  EXPECT_GT(largest, uint32_t{1} << 31);
  EXPECT_LE(int64_t{largest} * kernels::kPageGranuleBytes + real.group_bytes(), bytes);
  // A copy on write far past 4 GiB keeps all its bits.
  cache_->Release(s);
  const SeqSlot last = 2;
  const SeqSlot fork = cache_->Fork(last, cache_->length(last) - 1).value();
  ASSERT_TRUE(Reserve(fork, 1).ok());
  ASSERT_EQ(carried_.copies.size(), real.layers.size());
  EXPECT_GT(carried_.copies[0].source_offset, int64_t{1} << 32);
}

TEST_F(KvCacheTest, BoundsAreChecked) {
  std::vector<uint32_t> tables(4);
  const auto code = [&](const KvCacheOptions& options) {
    return KvCache::Create(options, tables).status().code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code({.bytes = 255, .max_sequences = 1, .max_pages_per_sequence = 1}), invalid);
  EXPECT_EQ(code({.bytes = INT64_MAX, .max_sequences = 1, .max_pages_per_sequence = 1}), invalid);
  EXPECT_EQ(code({.bytes = 4096, .max_sequences = 0, .max_pages_per_sequence = 1}), invalid);
  EXPECT_EQ(code({.bytes = 4096, .max_sequences = 1, .max_pages_per_sequence = 0}), invalid);
  EXPECT_EQ(code({.bytes = 4096, .max_sequences = 5, .max_pages_per_sequence = 1}), invalid);
  EXPECT_EQ(
      code({.bytes = 4096, .slab_bytes = -1, .max_sequences = 1, .max_pages_per_sequence = 1}),
      invalid);
  Make(2);
  const auto added = [&](const UniformLayers& uniform) {
    return cache_->AddLayout(MakeLayout(uniform)).status().code();
  };
  EXPECT_EQ(added({.row_bytes = 0, .page_size = 1, .layers = 1}), invalid);
  EXPECT_EQ(added({.row_bytes = 1, .page_size = 0, .layers = 1}), invalid);
  EXPECT_EQ(added({.row_bytes = 1, .page_size = 1, .layers = -1}), invalid);
  EXPECT_EQ(added({.row_bytes = int64_t{1} << 31, .page_size = 1 << 30, .layers = 3}),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->Open(7, 1).status().code(), invalid);
  EXPECT_EQ(cache_->Open(layout_, kMaxTenantKey).status().code(), invalid);
  const SeqSlot s = Open();
  EXPECT_EQ(Reserve(s, -1).code(), invalid);
  EXPECT_EQ(Reserve(5, 1).code(), invalid);
  EXPECT_EQ(Reserve(s, INT32_MAX).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->max_rows(s), 64);
  EXPECT_EQ(cache_->Truncate(s, 1).code(), invalid);
  EXPECT_EQ(cache_->Fork(s, -1).status().code(), invalid);
  for (int i = 1; i < 8; ++i) Open();
  EXPECT_EQ(cache_->Open(layout_, 1).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(KvCacheTest, SteadyStateAllocatesNothing) {
  Make(64, 4);
  const SeqSlot a = Open(1);
  const SeqSlot b = Open(2);
  const auto step = [&](int round) {
    const StepRows rows[] = {{a, 7}, {b, 3}};
    ASSERT_TRUE(cache_->Reserve(rows).ok());
    cache_->Commit(a, round % 2 == 0 ? 7 : 2);
    const SeqSlot child = cache_->Fork(a, cache_->length(a) - 1).value();
    const StepRows more[] = {{child, 9}};
    ASSERT_TRUE(cache_->Reserve(more).ok());
    WorkRoom room{.places = 2, .bytes = INT64_MAX};
    cache_->work().Take(1, cache_->work().last(), &room, &work_);
    cache_->work().Acknowledge(&work_);
    cache_->Rollback(child);
    cache_->Release(child);
    cache_->Rollback(b);
    ASSERT_TRUE(cache_->Truncate(a, cache_->length(a) / 2).ok());
  };
  for (int round = 0; round < 64; ++round) step(round);  // the work queue finds its capacity
  const int64_t before = kernels::testing::Allocations();
  for (int round = 0; round < 1000; ++round) step(round);
  EXPECT_EQ(kernels::testing::Allocations(), before);
}

using KvCacheDeathTest = KvCacheTest;

TEST_F(KvCacheDeathTest, BrokenRequirementsEndTheProcess) {
  Make(2);
  const SeqSlot s = Open();
  ASSERT_TRUE(Reserve(s, 1).ok());
  EXPECT_DEATH(cache_->Commit(s, 2), "not reserved");
  EXPECT_DEATH(cache_->length(3), "not open");
}

// Clients choose layouts, and the accounts of their groups take the server's memory.
TEST(KvCacheBooksTest, GroupsOfAFewBytesAreBounded) {
  std::vector<uint32_t> tables(16);
  auto cache = KvCache::Create({.bytes = int64_t{1} << 30,
                                .slab_bytes = int64_t{1} << 26,
                                .max_sequences = 1,
                                .max_pages_per_sequence = 16},
                               tables)
                   .value();
  const LayoutId tiny =
      cache->AddLayout(MakeLayout({.row_bytes = 2, .page_size = 1, .layers = 1})).value();
  EXPECT_EQ(cache->free_groups(tiny), SlabPool::kMostGroups);  // not 2^22 of 256 bytes
  const SeqSlot sequence = cache->Open(tiny, 1).value();
  const StepRows step[] = {{sequence, 16}};
  ASSERT_TRUE(cache->Reserve(step).ok());
  cache->Commit(sequence, 16);
  EXPECT_EQ(cache->free_groups(tiny), SlabPool::kMostGroups - 16);
  EXPECT_EQ(cache->CheckInvariants(), "");
}

}  // namespace
}  // namespace mla::kvcache
