// Accounting that is broken ends the process in the build that is shipped, not in debug builds
// only: each test breaks one thing and goes on as the engine would.
#include "scheduler/kvcache/pool/require.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/lease_table.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::kvcache {

// Breaks what no caller can reach.
class SlabPoolPeer final {
 public:
  static void LoseUsedGroup(SlabPool* pool) { --pool->stats_.groups_used; }
  static void LoseFreeGroup(SlabPool* pool) { --pool->stats_.groups_free; }
  static void LoseBytes(SlabPool* pool) { pool->stats_.bytes_used -= kernels::kPageGranuleBytes; }
  static void InventSharedGroup(SlabPool* pool) { pool->stats_.groups_shared = 1 << 20; }
  // The next Take finds a group on the free list that has an owner.
  static void FreeUsedGroup(SlabPool* pool) {
    pool->slabs_[0].free_head = 0;
    pool->slabs_[0].groups[0].next_free = -1;
  }
};

class KvCachePeer final {
 public:
  static SlabPool* Pool(KvCache* cache) { return &cache->pool_; }
};

namespace {

// Four rows a page, one granule a group.
const GroupLayout kSmall = MakeLayout({.row_bytes = 32, .page_size = 4, .layers = 2});
constexpr int32_t kPages = 16;

class RequireDeathTest : public ::testing::Test {
 protected:
  // Two sequences of two pages each in four slabs of four groups.
  RequireDeathTest() : tables_(size_t{4} * kPages, 0xdeadbeefu) {
    const KvCacheOptions options{.bytes = 16 * kSmall.group_bytes(),
                                 .slab_bytes = 4 * kSmall.group_bytes(),
                                 .max_sequences = 4,
                                 .max_pages_per_sequence = kPages};
    cache_ = KvCache::Create(options, tables_).value();
    layout_ = cache_->AddLayout(kSmall).value();
    a_ = cache_->Open(layout_, 1).value();
    b_ = cache_->Open(layout_, 2).value();
    for (const SeqSlot sequence : {a_, b_}) {
      EXPECT_TRUE(Reserve(sequence, 8).ok());
      cache_->Commit(sequence, 8);
    }
    EXPECT_EQ(cache_->CheckInvariants(), "");
  }

  absl::Status Reserve(SeqSlot sequence, int32_t rows) {
    const StepRows step[] = {{sequence, rows}};
    return cache_->Reserve(step);
  }

  uint32_t& Entry(SeqSlot sequence, int32_t page) {
    return tables_[static_cast<size_t>(cache_->page_table(sequence) + page)];
  }
  SlabPool* pool() { return KvCachePeer::Pool(cache_.get()); }

  std::vector<uint32_t> tables_;
  std::unique_ptr<KvCache> cache_;
  LayoutId layout_ = -1;
  SeqSlot a_ = -1, b_ = -1;
};

// Every mutation looks at the counters.
TEST_F(RequireDeathTest, LostGroupsEndTheProcess) {
  SlabPoolPeer::LoseUsedGroup(pool());
  constexpr char kWhat[] = "KV cache: page groups are not conserved";
  EXPECT_DEATH(Reserve(a_, 1).IgnoreError(), kWhat);
  EXPECT_DEATH(cache_->Fork(a_, 8).IgnoreError(), kWhat);
  EXPECT_DEATH(cache_->Truncate(a_, 0).IgnoreError(), kWhat);
  EXPECT_DEATH(cache_->Release(b_), kWhat);
}

TEST_F(RequireDeathTest, EachCounterIsCompared) {
  using Break = void (*)(SlabPool*);
  for (const Break what : {&SlabPoolPeer::LoseUsedGroup, &SlabPoolPeer::LoseFreeGroup,
                           &SlabPoolPeer::LoseBytes, &SlabPoolPeer::InventSharedGroup}) {
    EXPECT_DEATH(
        {
          what(pool());
          cache_->Truncate(a_, 8).IgnoreError();
        },
        "page groups are not conserved");
  }
}

TEST_F(RequireDeathTest, AGroupThatTwoTenantsHoldEndsTheProcess) {
  Entry(a_, 0) = Entry(b_, 0);  // as if a page of b had been handed to a
  EXPECT_NE(cache_->CheckInvariants(), "");
  EXPECT_DEATH(
      {
        cache_->Release(a_);
        cache_->Release(b_);
      },
      "KV cache: a page group is freed twice");
}

TEST_F(RequireDeathTest, AGroupInUseIsNotTakenAgain) {
  cache_->Release(b_);  // room in the slab, so that the next group comes from its free list
  SlabPoolPeer::FreeUsedGroup(pool());
  EXPECT_DEATH(Reserve(a_, 1).IgnoreError(), "a page group in use is on the free list");
}

TEST_F(RequireDeathTest, EntriesThatNameNoGroupEndTheProcess) {
  const struct {
    uint32_t entry;
    const char* what;
  } cases[] = {{0xdeadbeefu, "points past the pool"},
               {16, "points past the pool"},
               {12, "points into a free slab"}};
  for (const auto& bad : cases) {
    EXPECT_DEATH(
        {
          Entry(a_, 1) = bad.entry;
          cache_->Release(a_);
        },
        bad.what);
  }
}

TEST_F(RequireDeathTest, FreeGroupsAreNeitherSharedNorUndone) {
  const uint32_t entry = Entry(b_, 1);
  cache_->Release(b_);
  ASSERT_TRUE(cache_->Fork(a_, 4).ok());
  EXPECT_DEATH(pool()->Share(entry), "a free page group is shared");
  EXPECT_DEATH(pool()->Untake(entry), "undo of a page group that is shared or free");
  EXPECT_DEATH(pool()->Untake(Entry(a_, 0)), "undo of a page group that is shared or free");
  EXPECT_DEATH(pool()->RemoveLayout(layout_), "removal of a layout in use");
}

// One of two layers of the page that the fork shares has been copied.
TEST_F(RequireDeathTest, RowsAreNotKeptBeforeTheyAreCopied) {
  const SeqSlot fork = cache_->Fork(a_, 7).value();
  ASSERT_TRUE(Reserve(fork, 1).ok());
  WorkRoom room{.places = 1, .bytes = INT64_MAX};
  LaunchWork work;
  ASSERT_TRUE(cache_->work().TakeLayer(cache_->copied_group(fork), 1, &room, &work));
  cache_->work().Acknowledge(&work);
  EXPECT_DEATH(cache_->Commit(fork, 1), "rows are kept before they are copied");
}

TEST_F(RequireDeathTest, LeasesOutOfRangeEndTheProcess) {
  LeaseTable leases(2);
  EXPECT_DEATH(leases.Grant(2, 5), "lease id out of range");
  EXPECT_DEATH(leases.Grant(-1, 5), "lease id out of range");
}

}  // namespace
}  // namespace mla::kvcache
