#include "scheduler/kvcache/prefix/page_directory.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kvcache {
namespace {

PrefixKey Key(uint64_t number) { return {number * 0x9e3779b97f4a7c15u, number}; }

std::vector<PrefixKey> Keys(uint64_t count) {
  std::vector<PrefixKey> keys;
  for (uint64_t i = 0; i < count; ++i) keys.push_back(Key(i));
  return keys;
}

TEST(PageDirectoryTest, CountsLeadingPagesByWhereTheyAre) {
  PageDirectory directory;
  directory.Put(Key(0), Tier::kPool);
  directory.Put(Key(1), Tier::kHost);
  directory.Put(Key(2), Tier::kFile);
  directory.Put(Key(4), Tier::kPool);  // behind a page that is absent
  HeldPages held;
  EXPECT_FALSE(directory.Count(Keys(5), &held));
  EXPECT_EQ(held.pool, 1);
  EXPECT_EQ(held.host, 1);
  EXPECT_EQ(held.file, 1);
  EXPECT_EQ(held.sum(), 3);
}

TEST(PageDirectoryTest, APageMovesAndGoes) {
  PageDirectory directory;
  directory.Put(Key(0), Tier::kPool);
  directory.Put(Key(0), Tier::kFile);
  EXPECT_EQ(directory.Find(Key(0)), Tier::kFile);
  directory.Erase(Key(0));
  directory.Erase(Key(0));
  EXPECT_EQ(directory.Find(Key(0)), std::nullopt);
}

TEST(PageDirectoryTest, KeysWithTheSameHalfAreApart) {
  PageDirectory directory;
  directory.Put({7, 1}, Tier::kPool);
  EXPECT_EQ(directory.Find({7, 2}), std::nullopt);
  EXPECT_EQ(directory.Find({8, 1}), std::nullopt);
}

TEST(PageDirectoryTest, LooksGoOnWhilePagesComeAndGo) {
  PageDirectory directory;
  const std::vector<PrefixKey> keys = Keys(256);
  for (size_t i = 0; i < 128; ++i) directory.Put(keys[i], Tier::kPool);
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (int round = 0; round < 50; ++round) {
      for (size_t i = 128; i < keys.size(); ++i) directory.Put(keys[i], Tier::kPool);
      for (size_t i = 128; i < keys.size(); ++i) directory.Erase(keys[i]);
    }
    stop = true;
  });
  do {
    HeldPages held;
    directory.Count(keys, &held);
    EXPECT_GE(held.pool, 128);
  } while (!stop);
  owner.join();
  HeldPages held;
  EXPECT_FALSE(directory.Count(keys, &held));
  EXPECT_EQ(held.pool, 128);
}

}  // namespace
}  // namespace mla::kvcache
