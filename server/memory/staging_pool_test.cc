#include "server/memory/staging_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

namespace mla::server {
namespace {

class HeapBuffer final : public kernels::HostBuffer {
 public:
  explicit HeapBuffer(size_t bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes() override { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

constexpr size_t kUnit = StagingPool::kUnit;

TEST(StagingPoolTest, UsesAllOfAnOddSize) {
  StagingPool pool(std::make_unique<HeapBuffer>(13 * kUnit + 100));
  EXPECT_EQ(pool.total_bytes(), 13 * kUnit);
  std::vector<StagingPool::Block> blocks;
  while (auto block = pool.Take(1)) blocks.push_back(std::move(block));
  EXPECT_EQ(blocks.size(), 13u);
  EXPECT_EQ(pool.used_bytes(), 13 * kUnit);
  blocks.clear();
  EXPECT_EQ(pool.used_bytes(), 0u);
  // Merged again: the largest power of two inside is one block.
  EXPECT_TRUE(static_cast<bool>(pool.Take(8 * kUnit)));
  EXPECT_FALSE(static_cast<bool>(pool.Take(9 * kUnit)));
}

TEST(StagingPoolTest, Edges) {
  StagingPool pool(std::make_unique<HeapBuffer>(4 * kUnit));
  EXPECT_FALSE(static_cast<bool>(pool.Take(0)));
  EXPECT_FALSE(static_cast<bool>(pool.Take(4 * kUnit + 1)));
  EXPECT_FALSE(static_cast<bool>(pool.Take(SIZE_MAX)));
  StagingPool::Block block = pool.Take(4 * kUnit);
  ASSERT_TRUE(static_cast<bool>(block));
  EXPECT_FALSE(static_cast<bool>(pool.Take(1)));
  const uint64_t releases = pool.releases();
  StagingPool::Block moved = std::move(block);
  EXPECT_FALSE(static_cast<bool>(block));  // NOLINT(bugprone-use-after-move): it is empty now
  moved.Reset();
  EXPECT_EQ(pool.releases(), releases + 1);
  EXPECT_TRUE(static_cast<bool>(pool.Take(1)));
}

TEST(StagingPoolTest, BlocksNeverOverlap) {
  StagingPool pool(std::make_unique<HeapBuffer>(200 * kUnit));
  std::mt19937_64 random(3);
  std::vector<std::pair<StagingPool::Block, unsigned char>> held;
  for (int i = 0; i < 4000; ++i) {
    if (random() % 2 == 0 && !held.empty()) {
      const size_t index = random() % held.size();
      const auto& [block, mark] = held[index];
      const unsigned char expected = mark;
      EXPECT_TRUE(std::all_of(block.data(), block.data() + block.size(), [&](std::byte b) {
        return static_cast<unsigned char>(b) == expected;
      }));
      std::swap(held[index], held.back());
      held.pop_back();
    } else if (auto block = pool.Take(1 + random() % (12 * kUnit))) {
      const auto mark = static_cast<unsigned char>(random());
      std::memset(block.data(), mark, block.size());
      held.emplace_back(std::move(block), mark);
    }
  }
  held.clear();
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_TRUE(static_cast<bool>(pool.Take(128 * kUnit)));
}

TEST(StagingPoolTest, ManyThreads) {
  StagingPool pool(std::make_unique<HeapBuffer>(64 * kUnit));
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 5000; ++i) {
        StagingPool::Block block = pool.Take(1 + random() % (8 * kUnit));
        if (block) std::memset(block.data(), static_cast<int>(t), block.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.used_bytes(), 0u);
}

}  // namespace
}  // namespace mla::server
