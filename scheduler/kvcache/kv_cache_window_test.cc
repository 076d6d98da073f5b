#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/kvcache/kv_cache_fixture.h"

namespace mla::kvcache {
namespace {

// Layouts with a window: only the last committed rows are kept, in whole pages.
class KvCacheWindowTest : public KvCacheTest {
 protected:
  void SetUp() override {
    GroupLayout layout = kSmall;
    layout.window = 6;
    Make(256);
    layout_ = cache_->AddLayout(layout).value();
  }
  int64_t used() const { return cache_->stats().groups_used; }
};

TEST_F(KvCacheWindowTest, PagesBeforeTheWindowGo) {
  const SeqSlot s = Open();
  Append(s, 10);
  EXPECT_EQ(used(), 2);  // rows 4 to 7 and 8 to 9
  EXPECT_EQ(cache_->least_length(s), 4 + 6);
  const std::vector<uint32_t> last = {tables_[static_cast<size_t>(cache_->page_table(s)) + 2]};
  for (int i = 0; i < 1000; ++i) Append(s, 1);
  EXPECT_EQ(cache_->length(s), 1010);
  EXPECT_LE(used(), 3);
  EXPECT_GT(cache_->max_rows(s), 1010);
  cache_->Release(s);
  EXPECT_EQ(used(), 0);
}

TEST_F(KvCacheWindowTest, RowsOfAnOpenStepKeepWhatTheyMayGoBackTo) {
  const SeqSlot s = Open();
  Append(s, 8);
  const int64_t first = cache_->page_table(s);
  const std::vector<uint32_t> before = Table(s, 2);
  ASSERT_TRUE(Reserve(s, 40).ok());
  EXPECT_EQ(cache_->page_table(s), first);
  cache_->Rollback(s);
  EXPECT_EQ(Table(s, 2), before);
  ASSERT_TRUE(Reserve(s, 40).ok());
  cache_->Commit(s, 3);  // 11 rows: rows from 5 on are kept, so the page of 0 to 3 goes
  EXPECT_EQ(cache_->page_table(s), first - 1);
  EXPECT_EQ(tables_[static_cast<size_t>(first)], before[1]);
  const std::vector<kernels::TableRange> changes = TableChanges(s);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].first, first);
  EXPECT_EQ(changes[0].count, 2);
}

TEST_F(KvCacheWindowTest, ForkAndTruncateGoBackAsFarAsTheWindowIsWhole) {
  const SeqSlot s = Open();
  Append(s, 15);  // rows from 8 on are left
  EXPECT_EQ(cache_->least_length(s), 8 + 6);
  EXPECT_FALSE(cache_->Fork(s, 13).ok());
  EXPECT_FALSE(cache_->Truncate(s, 13).ok());
  const SeqSlot child = cache_->Fork(s, 14).value();
  EXPECT_EQ(cache_->group(child, 3), cache_->group(s, 3));
  Append(child, 1);  // copies the page that both write into
  EXPECT_NE(cache_->group(child, 3), cache_->group(s, 3));
  Append(child, 20);
  ASSERT_TRUE(cache_->Truncate(s, 14).ok());
  EXPECT_EQ(cache_->length(s), 14);
  Append(s, 30);
  EXPECT_EQ(cache_->CheckInvariants(), "");
}

// Sequences of two lists: compressed entries, of which all stay, and rows, of which the last stay.
class KvCacheTwoListsTest : public KvCacheWindowTest {
 protected:
  void SetUp() override { SetUpGroups(256); }
  void SetUpGroups(int64_t groups) {
    Make(groups);
    GroupLayout layout = kSmall;
    layout.window = 6;
    window_ = cache_->AddLayout(layout).value();
  }
  SeqSlot OpenBoth(TenantKey tenant = 1) { return cache_->Open(layout_, tenant, window_).value(); }
  uint32_t EntryAt(int64_t place) const { return tables_[static_cast<size_t>(place)]; }
  int32_t WindowLength(SeqSlot s) const { return cache_->length(s, PageList::kWindow); }

  LayoutId window_ = -1;
};

TEST_F(KvCacheTwoListsTest, OneCallChangesBoth) {
  const SeqSlot s = OpenBoth();
  ASSERT_TRUE(cache_->Has(s, PageList::kWindow));
  Append(s, 16);
  EXPECT_EQ(cache_->length(s), 16);
  EXPECT_EQ(WindowLength(s), 16);
  EXPECT_EQ(used(), 4 + 2);  // rows 0 to 15, and 8 to 15
  EXPECT_EQ(cache_->least_length(s), 8 + 6);
  EXPECT_EQ(cache_->group(s, 3), EntryAt(cache_->compressed_table(s) + 3));
  EXPECT_EQ(cache_->group(s, 3, PageList::kWindow), EntryAt(cache_->page_table(s) + 3));

  const SeqSlot child = cache_->Fork(s, 14).value();
  EXPECT_EQ(WindowLength(child), 14);
  EXPECT_EQ(used(), 4 + 2) << "shared";
  ASSERT_TRUE(cache_->Truncate(s, 15).ok());
  EXPECT_EQ(WindowLength(s), 15);
  cache_->Release(child);
  EXPECT_EQ(cache_->stats().sequences, 2);
  cache_->Release(s);
  EXPECT_EQ(cache_->stats().sequences, 0);
  EXPECT_EQ(used(), 0);
}

TEST_F(KvCacheTwoListsTest, AStepEndsForBoth) {
  const SeqSlot s = OpenBoth();
  Append(s, 3);
  ASSERT_TRUE(Reserve(s, 9).ok());
  EXPECT_EQ(cache_->reserved(s), 9);
  EXPECT_EQ(cache_->reserved(s, PageList::kWindow), 9);
  EXPECT_EQ(used(), 3 + 3);
  cache_->Rollback(s);
  EXPECT_EQ(cache_->reserved(s, PageList::kWindow), 0);
  EXPECT_EQ(used(), 1 + 1);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  ASSERT_TRUE(Reserve(s, 9).ok());
  cache_->Commit(s, 2);
  EXPECT_EQ(cache_->length(s), 5);
  EXPECT_EQ(WindowLength(s), 5);
}

TEST_F(KvCacheTwoListsTest, LaunchesPublishBoth) {
  const SeqSlot s = OpenBoth();
  ASSERT_TRUE(Reserve(s, 5).ok());
  ASSERT_EQ(carried_.tables.size(), 2u);
  EXPECT_EQ(carried_.tables[0].first, cache_->compressed_table(s));
  EXPECT_EQ(carried_.tables[1].first, cache_->page_table(s));
  EXPECT_NE(cache_->page_table(s), cache_->compressed_table(s));
  EXPECT_TRUE(TableChanges(s).empty());
  cache_->UnpublishTable(s);
  EXPECT_EQ(TableChanges(s).size(), 2u);
}

TEST_F(KvCacheTwoListsTest, BothLastPagesAreCopied) {
  const SeqSlot s = OpenBoth();
  Append(s, 6);
  const SeqSlot child = cache_->Fork(s, 6).value();
  EXPECT_EQ(cache_->copied_groups(child), CopiedGroups());
  const StepRows step[] = {{child, 1}};
  ASSERT_TRUE(cache_->Reserve(step).ok());
  const CopiedGroups copied = cache_->copied_groups(child);
  EXPECT_EQ(copied.by_list[0], cache_->group(child, 1));
  EXPECT_EQ(copied.by_list[1], cache_->group(child, 1, PageList::kWindow));
  cache_->Rollback(child);
  EXPECT_EQ(cache_->group(child, 1, PageList::kWindow), cache_->group(s, 1, PageList::kWindow));
}

// The pool has room for one of the lists.
TEST_F(KvCacheTwoListsTest, ARefusedStepReservesNeither) {
  SetUpGroups(6);
  const SeqSlot s = OpenBoth();
  Append(s, 4);
  const PageNeed need = cache_->NeedOf(s, 12);
  EXPECT_EQ(need.groups, 6);
  EXPECT_EQ(need.bytes, 6 * kSmall.group_bytes());
  const StepRows step[] = {{s, 12}};
  EXPECT_EQ(cache_->Reserve(step).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(cache_->has_reservation(s));
  EXPECT_EQ(used(), 2);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  Append(s, 8);
}

TEST_F(KvCacheTwoListsTest, OpenAndForkTakeTwoSlotsOrNone) {
  for (int i = 0; i < 3; ++i) OpenBoth();
  const SeqSlot single = Open();
  EXPECT_EQ(cache_->Open(layout_, 1, window_).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->stats().sequences, 7);
  cache_->Release(single);
  const SeqSlot s = OpenBoth();
  EXPECT_EQ(cache_->Fork(s, 0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->stats().sequences, 8);
  EXPECT_EQ(cache_->Open(layout_, 1, 7).status().code(), absl::StatusCode::kInvalidArgument);
}

// An import brings the last rows alone to the list of the window.
TEST_F(KvCacheTwoListsTest, SkippedPagesCountForTheWindow) {
  const SeqSlot s = OpenBoth();
  cache_->SkipPages(s, 2);
  EXPECT_EQ(cache_->NeedOf(s, 14).groups, 4 + 2);
  ASSERT_TRUE(Reserve(s, 14).ok());
  EXPECT_EQ(cache_->reserved(s), 14);
  EXPECT_EQ(cache_->reserved(s, PageList::kWindow), 6);
  cache_->Commit(s, 14);
  EXPECT_EQ(WindowLength(s), 14);
  EXPECT_EQ(used(), 4 + 2);
}

}  // namespace
}  // namespace mla::kvcache
