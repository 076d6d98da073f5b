// The rest of a budget that groups do not divide, and of slabs smaller than a group.
#include "scheduler/kvcache/pool/slab_pool.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kvcache {
namespace {

constexpr TenantKey kTenant = 1;

LayoutId Add(SlabPool* pool, int64_t group_bytes) {
  return pool->AddLayout(MakeLayout({.row_bytes = group_bytes, .page_size = 1, .layers = 1}))
      .value();
}

TEST(SlabPool, BytesLeftAreThoseOfGroupsThatTakeGives) {
  for (const int64_t size : {256, 1024, 13568, 20480}) {
    SlabPool pool(1 << 16, 0);
    const LayoutId layout = Add(&pool, size);
    int64_t taken = 0;
    while (true) {
      EXPECT_EQ(pool.BytesLeft(layout), pool.free_groups(layout) * size) << size << " " << taken;
      if (pool.Take(layout, kTenant).entry == SlabPool::kNoEntry) break;
      ++taken;
    }
    EXPECT_EQ(pool.BytesLeft(layout), 0) << size;
    EXPECT_EQ(taken, (1 << 16) / size);
  }
}

// A quarter of the pool is of no use to any group, and is not free.
TEST(SlabPool, WhatRoundingLeavesIsNotFree) {
  SlabPool pool(1 << 16, 0);
  const LayoutId layout = Add(&pool, 24'576);
  while (pool.Take(layout, kTenant).entry != SlabPool::kNoEntry) {
  }
  EXPECT_GT(pool.stats().bytes_total - pool.stats().bytes_used, (1 << 16) / 5);
  EXPECT_EQ(pool.BytesLeft(layout), 0);
}

TEST(SlabPool, SlabsOfOthersAreNotLeft) {
  SlabPool pool(1 << 16, 0);
  const LayoutId one = Add(&pool, 1024), other = Add(&pool, 2048);
  ASSERT_NE(pool.Take(one, kTenant).entry, SlabPool::kNoEntry);
  EXPECT_EQ(pool.BytesLeft(other), pool.free_groups(other) * 2048);
  EXPECT_LT(pool.BytesLeft(other), (1 << 16) - 1024);
}

// Pages of 64 rows of DeepSeek-V3's 61 layers, over slabs of 4 MiB: each group took two.
TEST(SlabPool, GroupsLargerThanASlabShareRuns) {
  constexpr int64_t kSlab = int64_t{4} << 20, kBudget = 60 * kSlab;
  SlabPool pool(kBudget, kSlab);
  const LayoutId small = Add(&pool, 1 << 20);
  const LayoutId layout =
      pool.AddLayout(MakeLayout({.row_bytes = 1152, .page_size = 64, .layers = 61})).value();
  const int64_t size = pool.group_bytes(layout);
  EXPECT_EQ(size, 4'497'408);
  EXPECT_EQ(pool.free_groups(layout), 50);  // five in six slabs; 55 would leave nothing over
  const SlabPool::Taken first = pool.Take(layout, kTenant);
  EXPECT_EQ(pool.free_in_slabs(layout), 4);
  EXPECT_EQ(pool.stats().slabs_free, 54);
  const SlabPool::Taken second = pool.Take(layout, kTenant);
  EXPECT_EQ(pool.offset(second.entry) - pool.offset(first.entry), size);
  EXPECT_EQ(pool.free_groups(small), 54 * 4);
  // The run goes back whole, with its last group.
  pool.Drop(first.entry);
  EXPECT_EQ(pool.stats().slabs_free, 54);
  pool.Drop(second.entry);
  EXPECT_EQ(pool.stats().slabs_free, 60);
  EXPECT_EQ(pool.free_groups(layout), 50);
}

// Counts up to a bound.
class BoundedAccount final : public PoolAccount {
 public:
  explicit BoundedAccount(int64_t bound) : bound_(bound) {}
  bool TakeGroup(int64_t) override { return true; }
  bool TakeSlab(int64_t bytes) override {
    if (slabs_ + bytes > bound_) return false;
    slabs_ += bytes;
    return true;
  }
  void ReturnGroup(int64_t) override {}
  void ReturnSlab(int64_t bytes) override { slabs_ -= bytes; }
  int64_t GroupRoom() const override { return int64_t{1} << 40; }
  int64_t slabs() const { return slabs_; }

 private:
  const int64_t bound_;
  int64_t slabs_ = 0;
};

TEST(SlabPool, ABoundThatARunExceedsGetsAShorterOne) {
  BoundedAccount account(10 * 1024);
  SlabPool pool(20 * 1024, 1024);
  Add(&pool, 1024);  // a slab holds one of the first layout's groups
  const LayoutId layout =
      pool.AddLayout(MakeLayout({.row_bytes = 1280, .page_size = 1, .layers = 1}), &account)
          .value();
  std::vector<uint32_t> entries;
  for (uint32_t e; (e = pool.Take(layout, kTenant).entry) != SlabPool::kNoEntry;) {
    entries.push_back(e);
  }
  EXPECT_EQ(pool.refusal(), TakeRefusal::kSlabBound);
  EXPECT_EQ(entries.size(), 7u);  // three in four slabs, three in four, and one in two
  EXPECT_EQ(account.slabs(), 10 * 1024);
  for (const uint32_t entry : entries) pool.Drop(entry);
  EXPECT_EQ(account.slabs(), 0);
}

// The most groups that fit ranges of free slabs, in runs no longer than the pool takes.
int64_t MostGroups(const std::vector<int64_t>& slab_bytes, const std::vector<bool>& free,
                   int64_t size) {
  int32_t slabs = 0;  // slabs of a run
  int64_t best_waste = 0;
  const auto least = static_cast<int32_t>((size + slab_bytes[0] - 1) / slab_bytes[0]);
  for (int32_t k = least; k <= std::max(least, SlabPool::kMostRunSlabs); ++k) {
    const int64_t waste = k * slab_bytes[0] % size;
    if (slabs == 0 || waste * slabs < best_waste * k) {
      slabs = k;
      best_waste = waste;
    }
    if (waste * SlabPool::kRunWaste <= k * slab_bytes[0]) {
      slabs = k;
      break;
    }
  }
  std::vector<int64_t> groups(free.size() + 1);  // in the slabs before each
  for (size_t end = 1; end <= free.size(); ++end) {
    groups[end] = groups[end - 1];
    int64_t bytes = 0;
    for (size_t begin = end; begin-- > 0 && free[begin] && end - begin <= size_t(slabs);) {
      bytes += slab_bytes[begin];
      groups[end] = std::max(groups[end], groups[begin] + bytes / size);
    }
  }
  return groups.back();
}

// Slabs are kept by another layout here and there. free_groups, and FreeWithoutIdle, must equal
// both the groups that Take then gives and the largest possible number.
TEST(SlabPool, FreeGroupsAreTheMostThatRunsHold) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int round = 0; round < 3000; ++round) {
    const int64_t granule = kernels::kPageGranuleBytes;
    const int64_t slab = (1 + below(24)) * granule;
    const int64_t count = 1 + below(30);
    const int64_t budget = count * slab - below(slab / granule) * granule;
    const int64_t size = std::min(slab + (1 + below(60)) * granule, budget);
    SlabPool pool(budget, slab);
    const LayoutId one = Add(&pool, granule), layout = Add(&pool, size);
    if (size <= slab) continue;
    // All slabs are taken, then some are given back, or held by the cache alone.
    std::vector<int64_t> slab_bytes(static_cast<size_t>(count), slab);
    slab_bytes.back() = budget - (count - 1) * slab;
    std::vector<bool> free(slab_bytes.size()), without_idle(slab_bytes.size());
    std::vector<std::vector<uint32_t>> held(slab_bytes.size());
    for (uint32_t e; (e = pool.Take(one, kTenant).entry) != SlabPool::kNoEntry;) {
      held[static_cast<size_t>(pool.offset(e) / slab)].push_back(e);
    }
    for (size_t s = 0; s < held.size(); ++s) {
      free[s] = below(3) != 0;
      without_idle[s] = free[s] || below(2) == 0;
      for (size_t g = 0; g < held[s].size(); ++g) {
        if (!free[s] && without_idle[s]) pool.Cache(held[s][g], 0);
        if (without_idle[s]) pool.Drop(held[s][g]);
      }
    }
    ASSERT_EQ(pool.free_groups(layout), MostGroups(slab_bytes, free, size)) << round;
    // Its own groups are taken and dropped in between, and some of them cached.
    std::vector<uint32_t> own;
    for (int step = 0; step < 60; ++step) {
      const int64_t before = pool.free_groups(layout);
      if (below(3) != 0) {
        const uint32_t e = pool.Take(layout, kTenant).entry;
        ASSERT_EQ(e != SlabPool::kNoEntry, before > 0) << round;
        if (e == SlabPool::kNoEntry) continue;
        own.push_back(e);
        ASSERT_EQ(pool.free_groups(layout), before - 1) << round;
      } else if (!own.empty()) {
        std::swap(own[static_cast<size_t>(below(int64_t(own.size())))], own.back());
        if (below(2) == 0) pool.Cache(own.back(), 0);
        pool.Drop(own.back());
        own.pop_back();
        ASSERT_GE(pool.free_groups(layout), before) << round;
      }
      ASSERT_TRUE(pool.CountersHold());
    }
    const int64_t want = pool.FreeWithoutIdle(layout, /*own_only=*/false);
    for (uint32_t e; (e = pool.oldest_idle(layout)) != SlabPool::kNoEntry;) pool.Uncache(e);
    ASSERT_LE(pool.free_groups(layout), want);
    for (std::vector<uint32_t> idle; !(idle = pool.IdleSlab(layout, false)).empty();) {
      for (const uint32_t e : idle) pool.Uncache(e);
    }
    ASSERT_EQ(pool.free_groups(layout), want) << round;
    for (const uint32_t e : own) pool.Drop(e);
    ASSERT_EQ(pool.free_groups(layout), MostGroups(slab_bytes, without_idle, size)) << round;
  }
}

}  // namespace
}  // namespace mla::kvcache
