// KvCache: prefixes that sequences share through the cache. Four rows a page.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "scheduler/kvcache/kv_cache_fixture.h"
#include "scheduler/kvcache/prefix/token_book.h"

namespace mla::kvcache {
namespace {

constexpr int32_t kAll = 1 << 20;

std::vector<uint32_t> Tokens(int32_t count, uint32_t first = 1) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class KvCachePrefixTest : public KvCacheTest {
 protected:
  void Declare(SeqSlot sequence, const std::vector<uint32_t>& tokens) {
    cache_->Declare(sequence, book_.Chain(1, 0, 4, tokens), static_cast<int32_t>(tokens.size()));
  }
  // A sequence that declares the tokens and takes the cached rows among them.
  SeqSlot OpenWith(const std::vector<uint32_t>& tokens, int32_t limit = kAll) {
    const SeqSlot sequence = Open();
    Declare(sequence, tokens);
    match_ = cache_->Match(sequence, limit);
    return sequence;
  }
  // Leaves rows of the tokens in the cache.
  void Leave(const std::vector<uint32_t>& tokens) {
    const SeqSlot sequence = Open();
    Declare(sequence, tokens);
    Append(sequence, static_cast<int32_t>(tokens.size()));
    cache_->Release(sequence);
  }
  int32_t Found(const std::vector<uint32_t>& tokens) {
    cache_->Release(OpenWith(tokens));
    return match_.rows;
  }

  TokenBook book_;
  PrefixMatch match_;
};

TEST_F(KvCachePrefixTest, WholePagesAreFoundOnceTheyAreCommitted) {
  Make(8);
  const SeqSlot first = Open();
  Declare(first, Tokens(10));
  EXPECT_EQ(Found(Tokens(10)), 0);
  EXPECT_EQ(match_.end, MatchEnd::kAbsent);
  ASSERT_TRUE(Reserve(first, 10).ok());
  EXPECT_EQ(Found(Tokens(10)), 0);  // reserved, not committed
  cache_->Commit(first, 9);
  const SeqSlot second = OpenWith(Tokens(10));
  EXPECT_EQ(match_.rows, 8);  // its last page is still being written
  EXPECT_EQ(cache_->length(second), 8);
  EXPECT_EQ(Table(second, 2), Table(first, 2));
  EXPECT_EQ(cache_->stats().groups_used, 3);
}

TEST_F(KvCachePrefixTest, TheLastPageIsFoundByRowsOnceItsSequenceHasEnded) {
  Make(8);
  Leave(Tokens(11));
  EXPECT_EQ(cache_->stats().groups_used, 0);
  EXPECT_EQ(cache_->stats().groups_cached, 3);
  EXPECT_EQ(Found(Tokens(11)), 11);
  EXPECT_EQ(match_.end, MatchEnd::kAll);
  EXPECT_EQ(Found(Tokens(30)), 11);
  std::vector<uint32_t> other = Tokens(11);
  other[9] = 77;
  EXPECT_EQ(Found(other), 9);
  EXPECT_EQ(match_.end, MatchEnd::kDiverged);
  other[1] = 77;
  EXPECT_EQ(Found(other), 1);  // rows of a whole page
  other[0] = 77;
  EXPECT_EQ(Found(other), 0);
  EXPECT_EQ(cache_->prefix_stats().hits, 4u);
  EXPECT_EQ(cache_->prefix_stats().rows_found, 32u);
}

TEST_F(KvCachePrefixTest, TheCallerBoundsAMatch) {
  Make(8);
  Leave(Tokens(11));
  const SeqSlot sequence = OpenWith(Tokens(11), 10);
  EXPECT_EQ(cache_->length(sequence), 10);
  EXPECT_EQ(match_.end, MatchEnd::kAll);
  EXPECT_EQ(cache_->Match(sequence, kAll).rows, 0);  // it ends inside a page
}

TEST_F(KvCachePrefixTest, WhatIsCachedIsCopiedBeforeItIsWritten) {
  Make(8);
  Leave(Tokens(6));
  const SeqSlot sequence = OpenWith(Tokens(6));
  const std::vector<uint32_t> before = Table(sequence, 2);
  Append(sequence, 1);
  EXPECT_EQ(carried_.copies.size(), 2u) << "one a layer";
  EXPECT_EQ(Table(sequence, 1)[0], before[0]);
  EXPECT_NE(Table(sequence, 2)[1], before[1]);
  EXPECT_EQ(cache_->stats().groups_used, 2);
  EXPECT_EQ(cache_->stats().groups_cached, 1);
  EXPECT_EQ(Found(Tokens(6)), 6);
}

TEST_F(KvCachePrefixTest, ALongerPageTakesThePlaceOfItsBeginning) {
  Make(8);
  Leave(Tokens(6));
  Leave(Tokens(5));  // says nothing new
  EXPECT_EQ(cache_->prefix_stats().nodes, 2);
  Leave(Tokens(7));
  EXPECT_EQ(cache_->prefix_stats().nodes, 2);
  EXPECT_EQ(cache_->prefix_stats().superseded, 1u);
  EXPECT_EQ(Found(Tokens(9)), 7);
}

TEST_F(KvCachePrefixTest, EndsOfTheOldestGoFirst) {
  Make(6);
  Leave(Tokens(12));
  Leave(Tokens(12, 100));
  EXPECT_EQ(Found(Tokens(12)), 12);  // now the younger one
  const SeqSlot sequence = Open();
  Append(sequence, 5);
  EXPECT_EQ(Found(Tokens(12, 100)), 4);
  EXPECT_EQ(match_.end, MatchEnd::kEvicted);
  EXPECT_EQ(Found(Tokens(12)), 12);
  EXPECT_EQ(cache_->prefix_stats().evicted, 2u);
  EXPECT_EQ(cache_->stats().freed[static_cast<size_t>(Freed::kEvicted)], 2u);
}

TEST_F(KvCachePrefixTest, EventsSayWhatBecomesOfCachedRows) {
  Make(3);
  EventLog log(7);
  cache_->set_events(&log);
  log.SetLayout(layout_, 5, "t", "m");
  const SeqSlot first = Open();
  cache_->SetName(first, 11, nullptr);
  Declare(first, Tokens(6));
  Append(first, 6);
  cache_->Note(first, EventKind::kExpired);
  cache_->Release(first);
  const SeqSlot second = Open();
  Append(second, 12);  // all of the pool
  cache_->Release(second);
  EXPECT_EQ(Found(Tokens(6)), 0);
  Leave(Tokens(4));
  cache_->DropCached(layout_);
  cache_->DropCached(layout_);  // no rows are cached

  EventLog::Cursor cursor = log.After(5, 0);
  const std::vector<Event> events = log.Read(5, 100, &cursor);
  std::vector<EventKind> kinds;
  for (const Event& event : events) kinds.push_back(event.kind);
  ASSERT_EQ(kinds, (std::vector{EventKind::kStored, EventKind::kExpired, EventKind::kStored,
                                EventKind::kEvicted, EventKind::kEvicted, EventKind::kStored,
                                EventKind::kDropped}));
  EXPECT_EQ(events[0].sequence, 11u);
  EXPECT_EQ(events[0].rows, 4);
  EXPECT_EQ(events[1].rows, 6);
  EXPECT_EQ(events[2].first_row, 4);
  EXPECT_EQ(events[2].rows, 2);
  EXPECT_FALSE(events[2].key.has_value());  // of a partial page
  EXPECT_EQ(events[2].parent, events[0].key);
  EXPECT_EQ(events[5].key, events[0].key);  // the same rows
  const std::vector<Miss> misses = log.Misses(5, 100);
  ASSERT_EQ(misses.size(), 1u);
  EXPECT_EQ(misses[0].end, MatchEnd::kEvicted);
  EXPECT_EQ(misses[0].rows_asked, 6);
}

TEST_F(KvCachePrefixTest, CachedGroupsYieldAndARefusalEvictsNothing) {
  Make(6);
  Leave(Tokens(8));
  const SeqSlot holder = OpenWith(Tokens(4));  // keeps one of both
  const SeqSlot sequence = Open();
  EXPECT_FALSE(Reserve(sequence, 24).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 1);
  EXPECT_EQ(Found(Tokens(8)), 8);
  ASSERT_TRUE(Reserve(sequence, 20).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 0);
  cache_->Release(holder);
  EXPECT_EQ(Found(Tokens(8)), 4);
}

TEST_F(KvCachePrefixTest, SlabsOfOtherLayoutsYield) {
  Make(6, /*slab_groups=*/2);
  Leave(Tokens(24));
  EXPECT_EQ(cache_->stats().groups_cached, 6);
  const LayoutId other = cache_->AddLayout(kSmall).value();
  const SeqSlot sequence = cache_->Open(other, 2).value();
  ASSERT_TRUE(Reserve(sequence, 9).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 2);
  EXPECT_EQ(carried_.scrubs.size(), 3u);  // another tenant's
  const SeqSlot more = cache_->Open(other, 2).value();
  EXPECT_FALSE(Reserve(more, 13).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 2);
  cache_->Release(more);
  cache_->Release(sequence);
}

class Bound final : public PoolAccount {
 public:
  bool TakeGroup(int64_t bytes) override { return bytes <= room && (room -= bytes, true); }
  bool TakeSlab(int64_t) override { return true; }
  void ReturnGroup(int64_t bytes) override { room += bytes; }
  void ReturnSlab(int64_t) override {}
  int64_t GroupRoom() const override { return room; }
  const void* owner() const override { return this; }
  int64_t room = 0;
};

TEST_F(KvCachePrefixTest, OwnCachedGroupsYieldToTheBoundOfTheirOwner) {
  Make(16, /*slab_groups=*/2);
  Bound bound;
  bound.room = 4 * kSmall.group_bytes();
  layout_ = cache_->AddLayout(kSmall, &bound).value();
  const LayoutId other = cache_->AddLayout(kSmall, &bound).value();
  Leave(Tokens(12));
  EXPECT_EQ(bound.room, kSmall.group_bytes());
  const SeqSlot sequence = cache_->Open(other, 1).value();
  EXPECT_FALSE(Reserve(sequence, 20).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 3);
  ASSERT_TRUE(Reserve(sequence, 12).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 1);
  EXPECT_EQ(Found(Tokens(12)), 4);
  cache_->Release(sequence);
  cache_->DropCached(layout_);
  ASSERT_TRUE(cache_->RemoveLayout(other).ok());
  ASSERT_TRUE(cache_->RemoveLayout(layout_).ok());
  EXPECT_EQ(bound.room, 4 * kSmall.group_bytes());
}

TEST_F(KvCachePrefixTest, ForksAndTruncationsKeepWhatTheyShare) {
  Make(12);
  const SeqSlot parent = Open();
  Declare(parent, Tokens(12));
  Append(parent, 12);
  const SeqSlot child = cache_->Fork(parent, 6).value();
  EXPECT_EQ(cache_->declared(child), 6);
  ASSERT_TRUE(cache_->Truncate(parent, 9).ok());
  EXPECT_EQ(cache_->declared(parent), 9);
  EXPECT_EQ(Found(Tokens(12)), 12);  // the rows that went are still cached
  Append(parent, 2);
  EXPECT_EQ(Found(Tokens(12)), 12);
  ASSERT_TRUE(cache_->Truncate(child, 0).ok());
  EXPECT_EQ(cache_->chain(child), nullptr);
}

TEST_F(KvCachePrefixTest, UndeclaredRowsAreNotPublished) {
  Make(8);
  const SeqSlot sequence = Open();
  Declare(sequence, Tokens(12));
  cache_->Undeclare(sequence, 5);
  Append(sequence, 12);
  cache_->Release(sequence);
  EXPECT_EQ(Found(Tokens(12)), 5);
}

TEST_F(KvCachePrefixTest, PagesThatWereNamedByKeysAreSharedWhole) {
  Make(8);
  const PrefixHasher hasher{PrefixSecret{}};
  auto chain = std::make_shared<PrefixChain>();
  chain->page_size = 4;
  const std::string keys[] = {std::string(32, 'a'), std::string(32, 'b')};
  hasher.AddPageKeys(keys, chain.get());
  const SeqSlot first = Open();
  cache_->Declare(first, chain, 8);
  Append(first, 7);
  cache_->Release(first);
  const SeqSlot second = Open();
  cache_->Declare(second, chain, 8);
  EXPECT_EQ(cache_->Match(second, kAll).rows, 4);
  EXPECT_EQ(cache_->stats().groups_cached, 0);
  const SeqSlot child = cache_->Fork(second, 3).value();
  EXPECT_EQ(cache_->declared(child), 0);  // keys say nothing of a part of a page
  ASSERT_TRUE(cache_->Truncate(second, 4).ok());
  EXPECT_EQ(cache_->declared(second), 4);
}

TEST_F(KvCachePrefixTest, TheCostOfAnOperationDoesNotGrowWithWhatIsCached) {
  Make(1024);
  uint64_t cost[2];
  for (const uint32_t round : {0, 1}) {
    for (uint32_t i = 0; i < (round == 0 ? 40u : 400u); ++i) Leave(Tokens(8, 50000 + 100 * i));
    const uint64_t before = cache_->prefix_stats().steps;
    Leave(Tokens(8, 1000 + 100 * round));
    EXPECT_EQ(Found(Tokens(8, 1000 + 100 * round)), 8);
    cost[round] = cache_->prefix_stats().steps - before;
  }
  EXPECT_EQ(cost[0], cost[1]);
}

TEST_F(KvCachePrefixTest, ALayoutGoesWithoutALookAtWhatOthersHaveCached) {
  Make(1024);
  for (uint32_t i = 0; i < 100; ++i) Leave(Tokens(8, 100 * i));
  const LayoutId other = cache_->AddLayout(kSmall).value();
  const uint64_t before = cache_->prefix_stats().steps;
  ASSERT_TRUE(cache_->RemoveLayout(other).ok());
  EXPECT_EQ(cache_->prefix_stats().steps, before);
  ASSERT_TRUE(cache_->RemoveLayout(layout_).ok());
  EXPECT_EQ(cache_->stats().groups_cached, 0);
}

}  // namespace
}  // namespace mla::kvcache
