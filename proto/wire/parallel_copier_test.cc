#include "proto/wire/parallel_copier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace mla::wire {
namespace {

// Random bytes in fragments of random sizes, an empty one now and then.
struct Source {
  Source(size_t bytes, uint64_t seed) : all(bytes) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t word = random();
      std::memcpy(all.data() + i, &word, sizeof(word));
    }
    for (size_t begin = 0; begin < bytes;) {
      const size_t size = std::min<size_t>(bytes - begin, random() % 70000);
      fragments.emplace_back(all.data() + begin, size);
      begin += size;
    }
  }
  std::vector<std::byte> all;
  std::vector<ParallelCopier::Fragment> fragments;
};

class ParallelCopierTest : public testing::TestWithParam<ParallelCopierOptions> {};

TEST_P(ParallelCopierTest, CopiesEveryByteToItsPlace) {
  ParallelCopier copier(GetParam());
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    const size_t offset = random() % 1000;
    const size_t size = random() % (3 * ParallelCopier::kSharedBytes);
    const Source source(offset + size + random() % 1000, random());
    std::vector<std::byte> to(size + 1, std::byte{0x5a});
    copier.Gather(source.fragments, offset, size, to.data());
    ASSERT_EQ(std::memcmp(to.data(), source.all.data() + offset, size), 0) << round;
    ASSERT_EQ(to[size], std::byte{0x5a}) << "one byte too many";
  }
}

TEST_P(ParallelCopierTest, ServesSeveralThreads) {
  ParallelCopier copier(GetParam());
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      const Source source(2 * ParallelCopier::kSharedBytes + 17, 100 + caller);
      std::vector<std::byte> to(source.all.size());
      for (int round = 0; round < 40; ++round) {
        std::memset(to.data(), 0, to.size());
        copier.Copy(source.all, to.data());
        wrong += to != source.all;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Copies until helpers have taken a piece more, which is only a matter of time where they take any.
bool GetsHelp(ParallelCopier* copier) {
  const std::vector<std::byte> from(size_t{8} << 20, std::byte{7});
  std::vector<std::byte> to(from.size());
  const uint64_t before = copier->helped();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (copier->helped() == before && std::chrono::steady_clock::now() < give_up) {
    copier->Copy(from, to.data());
  }
  return copier->helped() > before;
}

TEST_P(ParallelCopierTest, HelpersHelpAndDoSoAgainAfterTheirSleep) {
  ParallelCopier copier(GetParam());
  ASSERT_EQ(copier.threads(), GetParam().threads);
  if (copier.threads() == 1) {
    const std::vector<std::byte> from(2 * ParallelCopier::kSharedBytes);
    std::vector<std::byte> to(from.size());
    copier.Copy(from, to.data());
    EXPECT_EQ(copier.helped(), 0u);
    return;
  }
  for (int sleep = 0; sleep < 3; ++sleep) {
    EXPECT_TRUE(GetsHelp(&copier)) << sleep;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than any spin here
  }
}

TEST(ParallelCopierHelpTest, SmallCopiesAreTheCallersOwn) {
  ParallelCopier copier({4, 1000});
  const std::vector<std::byte> from(ParallelCopier::kSharedBytes - 1, std::byte{7});
  std::vector<std::byte> to(from.size());
  for (int i = 0; i < 200; ++i) copier.Copy(from, to.data());
  EXPECT_EQ(copier.helped(), 0u);
  EXPECT_EQ(to, from);
}

// More threads than cores: the caller comes to wait for helpers that do not run.
TEST(ParallelCopierHelpTest, WaitsForHelpersThatHaveLostTheirCores) {
  ParallelCopier copier({32, 1000});
  const Source source(2 * ParallelCopier::kSharedBytes, 5);
  std::vector<std::byte> to(source.all.size());
  for (int round = 0; round < 10; ++round) {
    std::memset(to.data(), 0, to.size());
    copier.Gather(source.fragments, 0, to.size(), to.data());
    ASSERT_EQ(to, source.all) << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ParallelCopierTest,
                         testing::Values(ParallelCopierOptions{1, 0}, ParallelCopierOptions{2, 0},
                                         ParallelCopierOptions{4, 50},
                                         ParallelCopierOptions{4, 2000}));

}  // namespace
}  // namespace mla::wire
