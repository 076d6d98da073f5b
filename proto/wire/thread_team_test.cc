#include "proto/wire/thread_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "proto/wire/futex.h"

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
  std::vector<ThreadTeam::Fragment> fragments;
};

class ThreadTeamTest : public testing::TestWithParam<ThreadTeamOptions> {};

TEST_P(ThreadTeamTest, CopiesEveryByteToItsPlace) {
  ThreadTeam team(GetParam());
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    const size_t offset = random() % 1000;
    const size_t size = random() % (3 * ThreadTeam::kSharedBytes);
    const Source source(offset + size + random() % 1000, random());
    std::vector<std::byte> copy(size + 1, std::byte{0x5a});
    team.Gather(source.fragments, offset, size, copy.data());
    ASSERT_EQ(std::memcmp(copy.data(), source.all.data() + offset, size), 0) << round;
    ASSERT_EQ(copy[size], std::byte{0x5a}) << "one byte too many";
  }
}

TEST_P(ThreadTeamTest, ServesSeveralThreads) {
  ThreadTeam team(GetParam());
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      const Source source(2 * ThreadTeam::kSharedBytes + 17, 100 + caller);
      std::vector<std::byte> copy(source.all.size());
      for (int round = 0; round < 40; ++round) {
        std::memset(copy.data(), 0, copy.size());
        team.Copy(source.all, copy.data());
        wrong += copy != source.all;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Copies until helpers have taken a piece more, which is only a matter of time where they take any.
bool GetsHelp(ThreadTeam* team) {
  const std::vector<std::byte> from(size_t{8} << 20, std::byte{7});
  std::vector<std::byte> copy(from.size());
  const uint64_t before = team->helped();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (team->helped() == before && std::chrono::steady_clock::now() < give_up) {
    team->Copy(from, copy.data());
  }
  return team->helped() > before;
}

TEST_P(ThreadTeamTest, HelpersHelpAndDoSoAgainAfterTheirSleep) {
  ThreadTeam team(GetParam());
  ASSERT_EQ(team.threads(), GetParam().threads);
  if (team.threads() == 1) {
    const std::vector<std::byte> from(2 * ThreadTeam::kSharedBytes);
    std::vector<std::byte> copy(from.size());
    team.Copy(from, copy.data());
    EXPECT_EQ(team.helped(), 0u);
    return;
  }
  for (int sleep = 0; sleep < 3; ++sleep) {
    EXPECT_TRUE(GetsHelp(&team)) << sleep;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than any spin here
  }
}

TEST(ThreadTeamHelpTest, SmallCopiesAreTheCallersOwn) {
  ThreadTeam team({4, 1000});
  const std::vector<std::byte> from(ThreadTeam::kSharedBytes - 1, std::byte{7});
  std::vector<std::byte> copy(from.size());
  for (int i = 0; i < 200; ++i) team.Copy(from, copy.data());
  EXPECT_EQ(team.helped(), 0u);
  EXPECT_EQ(copy, from);
}

TEST_P(ThreadTeamTest, DoesEachPieceOnceOrNone) {
  ThreadTeam team(GetParam());
  for (const uint32_t pieces : {1u, 3u, 64u, 1000u}) {
    std::vector<std::atomic<int>> done(pieces);
    const bool ran = team.Run(pieces, [&](uint32_t piece) { ++done.at(piece); });
    EXPECT_EQ(ran, team.threads() > 1);
    for (const std::atomic<int>& times : done) ASSERT_EQ(times, ran ? 1 : 0) << pieces;
  }
}

TEST_P(ThreadTeamTest, BeginsPiecesInTheirOrder) {
  ThreadTeam team(GetParam());
  for (int round = 0; round < 50; ++round) {
    std::atomic<uint32_t> done{0};
    (void)team.Run(64, [&](uint32_t piece) {
      while (done != piece) SpinPause();  // would not end if a later one had been begun first
      ++done;
    });
    EXPECT_EQ(done, team.threads() > 1 ? 64u : 0u);
  }
}

TEST(ThreadTeamHelpTest, LeavesTheWorkToACallerThatFindsItBusy) {
  ThreadTeam team({2, 0});
  bool second = true;
  const bool first = team.Run(
      1, [&](uint32_t) { std::thread([&] { second = team.Run(1, [](uint32_t) {}); }).join(); });
  EXPECT_TRUE(first);
  EXPECT_FALSE(second);
}

// More threads than cores: the caller comes to wait for helpers that do not run.
TEST(ThreadTeamHelpTest, WaitsForHelpersThatHaveLostTheirCores) {
  ThreadTeam team({32, 1000});
  const Source source(2 * ThreadTeam::kSharedBytes, 5);
  std::vector<std::byte> copy(source.all.size());
  for (int round = 0; round < 10; ++round) {
    std::memset(copy.data(), 0, copy.size());
    team.Gather(source.fragments, 0, copy.size(), copy.data());
    ASSERT_EQ(copy, source.all) << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadTeamTest,
                         testing::Values(ThreadTeamOptions{1, 0}, ThreadTeamOptions{2, 0},
                                         ThreadTeamOptions{4, 50}, ThreadTeamOptions{4, 2000}));

}  // namespace
}  // namespace mla::wire
