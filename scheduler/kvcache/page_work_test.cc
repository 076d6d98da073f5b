// Page work: which work waits, which a launch takes, and what happens to it when launches fail.
#include "scheduler/kvcache/pool/page_work.h"

#include <utility>
#include <vector>

#include "scheduler/kvcache/kv_cache_fixture.h"

namespace mla::kvcache {
namespace {

// Queues work and runs launches of limited room.
class PageWorkTest : public KvCacheTest {
 protected:
  // Takes work of the tenant into a launch. Returns true if none is left.
  bool Take(TenantKey tenant, LaunchWork* work, int64_t places = 100) {
    WorkRoom room{.places = places, .bytes = INT64_MAX};
    return cache_->work().Take(tenant, cache_->work().last(), &room, work);
  }
  bool TakeLayer(SeqSlot sequence, int32_t layer, LaunchWork* work, int64_t places = 100) {
    WorkRoom room{.places = places, .bytes = INT64_MAX};
    return cache_->work().TakeLayer(cache_->copied_group(sequence), layer, &room, work);
  }
  // Launches make the copy of the sequence's page, if there is one.
  void Carry(SeqSlot sequence) {
    TakeLayers(sequence);
    cache_->work().Acknowledge(&work_);
  }
  int64_t GroupOf(SeqSlot sequence) {  // the offset of its first
    return int64_t{Table(sequence, 1)[0]} * kernels::kPageGranuleBytes;
  }
  absl::Status Queue(SeqSlot sequence, int32_t rows) {
    const StepRows step[] = {{sequence, rows}};
    return cache_->Reserve(step);
  }
  // Groups that tenant 1 has used.
  void Dirty(int32_t groups) {
    const SeqSlot s = Open(1);
    Append(s, groups * kSmall.page_size);
    cache_->Release(s);
  }
};

TEST_F(PageWorkTest, LaunchTakesWhatFitsAndTheRestStays) {
  Make(8);
  Dirty(4);
  const SeqSlot s = Open(2);
  ASSERT_TRUE(Queue(s, 16).ok());
  EXPECT_EQ(cache_->work().queued(), 4);
  const WorkTicket ticket = cache_->work().last();
  LaunchWork first, second;
  EXPECT_FALSE(Take(2, &first, 3));
  EXPECT_EQ(first.ranges().size(), 3u);
  EXPECT_EQ(first.bytes(), 3 * kSmall.group_bytes());
  EXPECT_TRUE(cache_->work().Waits(2, ticket));
  EXPECT_TRUE(Take(2, &second));
  EXPECT_FALSE(cache_->work().Waits(2, ticket));
  cache_->work().Acknowledge(&first);
  cache_->work().Acknowledge(&second);
  EXPECT_TRUE(second.empty());
}

TEST_F(PageWorkTest, PieceLargerThanTheRoomGoesAlone) {
  Make(8);
  Dirty(2);
  ASSERT_TRUE(Queue(Open(2), 8).ok());
  WorkRoom room{.places = 100, .bytes = 1};
  LaunchWork work;
  EXPECT_FALSE(cache_->work().Take(2, cache_->work().last(), &room, &work));
  EXPECT_EQ(work.ranges().size(), 1u);
  cache_->work().Acknowledge(&work);
}

TEST_F(PageWorkTest, WorkOfAnAbortedStepIsCancelledAndTheNextTenantStillZeroes) {
  Make(1);
  Dirty(1);
  SeqSlot s = Open(2);
  ASSERT_TRUE(Queue(s, 1).ok());
  EXPECT_EQ(cache_->work().queued(), 1);
  cache_->Rollback(s);
  EXPECT_EQ(cache_->work().queued(), 0);
  cache_->Release(s);
  // The bytes still belong to tenant 1.
  s = Open(2);
  ASSERT_TRUE(Queue(s, 1).ok());
  EXPECT_EQ(cache_->work().queued(), 1);
}

TEST_F(PageWorkTest, ForksThatAreReleasedLeaveNoWork) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 5);
  for (int i = 0; i < 5000; ++i) {
    const SeqSlot child = cache_->Fork(parent, 5).value();
    ASSERT_TRUE(Queue(child, 1).ok());
    cache_->Rollback(child);
    cache_->Release(child);
  }
  EXPECT_EQ(cache_->work().copies_open(), 0);
  EXPECT_EQ(cache_->stats().groups_used, 2);
  EXPECT_EQ(cache_->stats().bytes_copied, 0u);
}

// A layer is copied by the launch that first writes it; layers that no launch writes are not
// copied.
TEST_F(PageWorkTest, LayersAreCopiedOneByOne) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 3);
  const SeqSlot child = cache_->Fork(parent, 3).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  const int64_t source = GroupOf(parent), target = GroupOf(child);
  EXPECT_EQ(cache_->work().queued(), 0);
  EXPECT_FALSE(cache_->work().Waits(1, cache_->work().last()));
  LaunchWork first, second;
  EXPECT_FALSE(TakeLayer(child, 1, &first, /*places=*/0));
  ASSERT_TRUE(TakeLayer(child, 1, &first));
  ASSERT_EQ(first.ranges().size(), 1u);
  EXPECT_EQ(first.ranges()[0].target_offset, target + 4 * 32);
  EXPECT_EQ(first.ranges()[0].source_offset, source + 4 * 32);
  EXPECT_EQ(first.ranges()[0].bytes, 3 * 32);
  ASSERT_TRUE(TakeLayer(child, 1, &second)) << "a launch has it";
  EXPECT_TRUE(second.empty());
  ASSERT_TRUE(TakeLayer(child, 0, &second));
  cache_->work().Acknowledge(&first);
  EXPECT_EQ(cache_->stats().bytes_copied, 3u * 32);
  cache_->work().Acknowledge(&second);
  EXPECT_EQ(cache_->stats().bytes_copied, 2u * 3 * 32);
  EXPECT_EQ(cache_->stats().copies_on_write, 1u);
  cache_->Commit(child, 1);
  EXPECT_EQ(cache_->work().copies_open(), 0);
  EXPECT_EQ(cache_->stats().groups_shared, 0);
}

// If layers come in order, few launches carry the copies, and never more than twice as many layers
// as were written.
TEST_F(PageWorkTest, LayersInOrderTakeOthersAlong) {
  Make(64);
  layout_ = cache_->AddLayout(MakeLayout({.row_bytes = 32, .page_size = 4, .layers = 9})).value();
  const SeqSlot parent = Open();
  Append(parent, 3);
  const SeqSlot child = cache_->Fork(parent, 3).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  std::vector<size_t> taken;
  for (int32_t layer = 0; layer < 9; ++layer) {
    LaunchWork work;
    ASSERT_TRUE(TakeLayer(child, layer, &work, /*places=*/3));
    taken.push_back(work.ranges().size());
    cache_->work().Acknowledge(&work);
  }
  // Room for three: 0 and 1, 2 to 4, 5 to 7, 8.
  EXPECT_EQ(taken, (std::vector<size_t>{2, 0, 3, 0, 0, 3, 0, 0, 1}));
  cache_->Commit(child, 1);
}

TEST_F(PageWorkTest, AStepThatKeepsNoRowSharesItsPageAgain) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 6);
  const SeqSlot child = cache_->Fork(parent, 6).value();
  const std::vector<uint32_t> shared = Table(parent, 2);
  ASSERT_TRUE(Queue(child, 3).ok());
  TableChanges(child);
  cache_->Rollback(child);  // no layer was written
  EXPECT_EQ(Table(child, 2), shared);
  EXPECT_EQ(TableChanges(child).at(0).count, 1);
  EXPECT_EQ(cache_->stats().copies_on_write, 0u);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  ASSERT_TRUE(Queue(child, 3).ok());
  LaunchWork work;
  ASSERT_TRUE(TakeLayer(child, 1, &work));
  cache_->work().Acknowledge(&work);
  cache_->Commit(child, 0);  // one of two was
  EXPECT_EQ(Table(child, 2), shared);
  EXPECT_EQ(cache_->stats().groups_used, 2);
  EXPECT_EQ(cache_->stats().groups_shared, 2);
  EXPECT_EQ(cache_->stats().bytes_copied, 2u * 32);
  EXPECT_EQ(cache_->work().copies_open(), 0);
}

// The shared page stays while a copy of it may be made or dropped, though its other owner has gone.
TEST_F(PageWorkTest, TheSourceOutlivesItsOwner) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 6);
  const SeqSlot child = cache_->Fork(parent, 6).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  const uint32_t source = Table(parent, 2)[1];
  LaunchWork work;
  ASSERT_TRUE(TakeLayer(child, 0, &work));
  cache_->work().Acknowledge(&work);
  cache_->Release(parent);
  EXPECT_EQ(cache_->stats().groups_pinned, 1);
  EXPECT_EQ(cache_->stats().groups_used, 2) << "page 0 and the copy";
  EXPECT_EQ(cache_->CheckInvariants(), "");
  cache_->Rollback(child);
  EXPECT_EQ(Table(child, 2)[1], source);
  EXPECT_EQ(cache_->stats().groups_pinned, 0);
  EXPECT_EQ(cache_->stats().groups_used, 2);
  EXPECT_EQ(cache_->CheckInvariants(), "");
  ASSERT_TRUE(Queue(child, 1).ok());
  EXPECT_EQ(Table(child, 2)[1], source) << "nothing else has it";
}

// Two beams leave a page that its first owner has given up, while layers are on their way.
TEST_F(PageWorkTest, ReleasedWhileALayerIsCopied) {
  Make(4);
  const SeqSlot parent = Open();
  Append(parent, 2);
  const SeqSlot a = cache_->Fork(parent, 2).value(), b = cache_->Fork(parent, 2).value();
  cache_->Release(parent);
  ASSERT_TRUE(Queue(a, 1).ok());
  ASSERT_TRUE(Queue(b, 1).ok());
  EXPECT_EQ(cache_->copied_group(b), SlabPool::kNoEntry) << "the last one writes in place";
  LaunchWork work;
  ASSERT_TRUE(TakeLayer(a, 1, &work));
  cache_->Release(a);
  EXPECT_EQ(cache_->stats().groups_used, 1);
  EXPECT_EQ(cache_->stats().groups_pinned, 1) << "the launch still writes";
  cache_->work().Acknowledge(&work);
  EXPECT_EQ(cache_->stats().groups_pinned, 0);
  EXPECT_EQ(cache_->work().copies_open(), 0);
}

// A group with another tenant's bytes is written whole, with the first layer.
TEST_F(PageWorkTest, CopyTakesTheRowsThatTheSequenceHas) {
  Make(2);
  const SeqSlot foreign = Open(2);
  Append(foreign, 8);
  cache_->Release(foreign);
  const SeqSlot parent = Open();
  Append(parent, 4);
  const SeqSlot child = cache_->Fork(parent, 3).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  LaunchWork work;
  ASSERT_TRUE(TakeLayer(child, 1, &work, /*places=*/1));
  ASSERT_EQ(work.ranges().size(), 1u);
  EXPECT_EQ(work.ranges()[0].bytes, kSmall.group_bytes());
  EXPECT_EQ(work.ranges()[0].target_offset, GroupOf(child));
  ASSERT_TRUE(TakeLayer(child, 0, &work));
  EXPECT_EQ(work.ranges().size(), 1u);
  cache_->work().Acknowledge(&work);
  EXPECT_EQ(cache_->stats().bytes_copied, static_cast<uint64_t>(kSmall.group_bytes()));
  cache_->Commit(child, 1);
}

// Planes that some layers have and others have not, and one whose rows stand for two tokens.
TEST_F(PageWorkTest, CopyTakesEveryPlane) {
  Make(64);
  GroupLayout mixed;
  mixed.page_size = 4;
  const KvPlane rows{.row_stride = 32, .rows = 4};
  const KvPlane pairs{.row_stride = 16, .rows = 2, .token_ratio = 2};
  for (int64_t layer = 0, at = 0; layer < 4; ++layer) {
    mixed.layers.emplace_back();
    if (layer == 3) break;  // no plane
    mixed.layers.back().push_back(rows);
    mixed.layers.back()[0].offset = at;
    at += 4 * 32;
    if (layer == 1) continue;
    mixed.layers.back().push_back(pairs);
    mixed.layers.back()[1].offset = at;
    at += 2 * 16;
    mixed.bytes = at;
  }
  layout_ = cache_->AddLayout(mixed).value();
  const SeqSlot parent = Open();
  Append(parent, 4);
  const SeqSlot child = cache_->Fork(parent, 3).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  const std::vector<std::vector<std::pair<int64_t, int64_t>>> want = {
      {{0, 96}, {128, 32}}, {{160, 96}}, {{288, 96}, {416, 32}}, {}};  // at, and bytes
  for (int32_t layer = 3; layer >= 0; --layer) {
    LaunchWork work;
    ASSERT_TRUE(TakeLayer(child, layer, &work));
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (const kernels::PageRange& range : work.ranges()) {
      pieces.emplace_back(range.source_offset - GroupOf(parent), range.bytes);
    }
    EXPECT_EQ(pieces, want[static_cast<size_t>(layer)]) << layer;
    EXPECT_EQ(work.places(), static_cast<int64_t>(pieces.size()));
    cache_->work().Acknowledge(&work);
  }
  cache_->Commit(child, 1);
}

TEST_F(PageWorkTest, RowsThatACopyReadsAreNotOverwritten) {
  Make(8);
  const SeqSlot parent = Open();
  Append(parent, 6);
  const SeqSlot child = cache_->Fork(parent, 6).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  const uint32_t source = Table(parent, 2)[1];
  ASSERT_TRUE(Queue(parent, 1).ok());
  EXPECT_EQ(Table(parent, 2)[1], source) << "row 6 is none of the copied rows";
  cache_->Rollback(parent);
  ASSERT_TRUE(cache_->Truncate(parent, 5).ok());
  ASSERT_TRUE(Queue(parent, 1).ok());
  EXPECT_NE(Table(parent, 2)[1], source) << "row 5 is copied later";
  EXPECT_EQ(cache_->CheckInvariants(), "");
  Carry(child);
  Carry(parent);
  cache_->Commit(child, 1);
  cache_->Commit(parent, 1);
  EXPECT_EQ(cache_->stats().groups_pinned, 0);
}

// Two launches run when the first fails: zeroing comes back in order.
TEST_F(PageWorkTest, FailedLaunchesReturnTheirWorkInOrder) {
  Make(8);
  Dirty(8);
  ASSERT_TRUE(Queue(Open(2), 16).ok());
  LaunchWork first, second, again;
  ASSERT_FALSE(Take(2, &first, 2));
  ASSERT_TRUE(Take(2, &second));
  const kernels::PageRange oldest = first.ranges()[0];
  cache_->work().Requeue(&second);
  cache_->work().Requeue(&first);
  EXPECT_EQ(cache_->work().queued(), 4);
  ASSERT_TRUE(Take(2, &again));
  ASSERT_EQ(again.ranges().size(), 4u);
  EXPECT_EQ(again.ranges()[0].target_offset, oldest.target_offset);
  cache_->work().Acknowledge(&again);
}

// A failed launch counts as not having copied its layers; layers copied by other launches stay
// copied.
TEST_F(PageWorkTest, LayersOfAFailedLaunchAreCopiedAgain) {
  Make(3);
  const SeqSlot parent = Open();
  Append(parent, 3);
  const SeqSlot child = cache_->Fork(parent, 3).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  LaunchWork done, lost, again;
  ASSERT_TRUE(TakeLayer(child, 1, &lost));
  ASSERT_TRUE(TakeLayer(child, 0, &done));
  cache_->work().Acknowledge(&done);
  cache_->work().Requeue(&lost);
  ASSERT_TRUE(TakeLayer(child, 0, &again));
  EXPECT_TRUE(again.empty());
  ASSERT_TRUE(TakeLayer(child, 1, &again));
  EXPECT_EQ(again.ranges().size(), 1u);
  cache_->work().Requeue(&again);
  cache_->Release(child);
  EXPECT_EQ(cache_->work().copies_open(), 0);
  EXPECT_EQ(cache_->stats().groups_used, 1);
  EXPECT_EQ(cache_->stats().groups_pinned, 0);
  // The group's contents after failed launches are unknown.
  ASSERT_TRUE(Queue(Open(1), 8).ok());
  EXPECT_EQ(cache_->work().queued(), 1);
}

TEST_F(PageWorkTest, GroupFreedUnderAFailingLaunchCountsAsForeign) {
  Make(1);
  Dirty(1);
  SeqSlot s = Open(2);
  ASSERT_TRUE(Queue(s, 1).ok());
  LaunchWork work;
  ASSERT_TRUE(Take(2, &work));
  cache_->Rollback(s);
  cache_->Release(s);
  EXPECT_EQ(cache_->stats().groups_pinned, 1);
  EXPECT_FALSE(Queue(Open(1), 1).ok()) << "not handed out while the launch runs";
  cache_->work().Requeue(&work);
  EXPECT_EQ(cache_->work().queued(), 0);
  EXPECT_EQ(cache_->stats().groups_used, 0);
  ASSERT_TRUE(Queue(Open(1), 1).ok());
  EXPECT_EQ(cache_->work().queued(), 1) << "the launch may have run in part";
}

TEST_F(PageWorkTest, GroupWhoseWorkFailedAndWasCancelledCountsAsForeign) {
  Make(1);
  Dirty(1);
  SeqSlot s = Open(2);
  ASSERT_TRUE(Queue(s, 1).ok());
  LaunchWork work;
  ASSERT_TRUE(Take(2, &work));
  cache_->work().Requeue(&work);
  cache_->Release(s);
  EXPECT_EQ(cache_->work().queued(), 0);
  ASSERT_TRUE(Queue(Open(1), 1).ok());
  EXPECT_EQ(cache_->work().queued(), 1) << "the launch may have run in part";
}

TEST_F(PageWorkTest, TenantsDoNotWaitForEachOther) {
  Make(8);
  Dirty(4);
  ASSERT_TRUE(Queue(Open(2), 12).ok());
  ASSERT_TRUE(Queue(Open(3), 4).ok());
  LaunchWork work;
  EXPECT_TRUE(Take(3, &work, 1));
  EXPECT_EQ(work.ranges().size(), 1u);
  EXPECT_TRUE(cache_->work().Waits(2, cache_->work().last()));
  cache_->work().Acknowledge(&work);
}

// Counts bytes taken and returned; ends before the pool does.
class CountingAccount final : public PoolAccount {
 public:
  bool TakeGroup(int64_t bytes) override {
    groups += bytes;
    return true;
  }
  bool TakeSlab(int64_t bytes) override {
    slabs += bytes;
    return true;
  }
  void ReturnGroup(int64_t bytes) override { groups -= bytes; }
  void ReturnSlab(int64_t bytes) override { slabs -= bytes; }
  int64_t GroupRoom() const override { return int64_t{1} << 40; }
  int64_t groups = 0, slabs = 0;
};

TEST_F(PageWorkTest, PinnedGroupsOutliveTheirLayoutAndNotItsAccount) {
  Make(8);
  auto account = std::make_unique<CountingAccount>();
  const LayoutId other = cache_->AddLayout(kSmall, account.get()).value();
  const SeqSlot parent = cache_->Open(other, 1).value();
  Append(parent, 6);
  const SeqSlot child = cache_->Fork(parent, 6).value();
  ASSERT_TRUE(Queue(child, 1).ok());
  LaunchWork work;
  ASSERT_TRUE(TakeLayer(child, 0, &work));
  cache_->Release(parent);
  cache_->Release(child);
  EXPECT_EQ(cache_->stats().groups_pinned, 2);
  EXPECT_TRUE(cache_->RemoveLayout(other).ok());
  EXPECT_EQ(account->groups, 0);
  EXPECT_EQ(account->slabs, 0);
  account.reset();
  cache_->work().Acknowledge(&work);
  EXPECT_EQ(cache_->stats().groups_pinned, 0);
}

// Bytes of tenant 2 go into the group after its zeroing: if the zeroing were cancelled, the group
// would go back to tenant 1 as its own.
TEST(PageWorkQueueTest, WorkOfAGroupThatOthersPinIsDone) {
  SlabPool pool(kSmall.group_bytes(), 0);
  PageWorkQueue work(&pool);
  const LayoutId layout = pool.AddLayout(kSmall).value();
  pool.Drop(pool.Take(layout, 1).entry);
  const SlabPool::Taken taken = pool.Take(layout, 2);
  ASSERT_TRUE(taken.dirty);
  work.AddZeroing(2, taken.entry, kSmall.group_bytes());
  pool.Pin(taken.entry);
  work.Cancel(taken.entry);  // its sequence is released
  EXPECT_EQ(work.queued(), 1);
  pool.Drop(taken.entry);
  WorkRoom room{.places = 1, .bytes = INT64_MAX};
  LaunchWork carried;
  EXPECT_TRUE(work.Take(2, work.last(), &room, &carried));
  work.Acknowledge(&carried);
  pool.Unpin(taken.entry);
  EXPECT_TRUE(pool.Take(layout, 1).dirty);
}

}  // namespace
}  // namespace mla::kvcache
