// What is left of a budget that groups do not divide.
#include "scheduler/kvcache/pool/slab_pool.h"

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

}  // namespace
}  // namespace mla::kvcache
