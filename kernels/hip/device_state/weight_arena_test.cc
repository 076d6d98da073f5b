#include "kernels/hip/device_state/weight_arena.h"

#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels::hip {
namespace {

TEST(WeightArenaTest, TakesTheLowestPieceThatIsLargeEnough) {
  WeightArena arena(100, 4);
  ASSERT_TRUE(arena.Take(0, 30));
  ASSERT_TRUE(arena.Take(1, 40));
  ASSERT_TRUE(arena.Take(2, 30));
  EXPECT_EQ(arena.at(0), 0);
  EXPECT_EQ(arena.at(1), 30);
  EXPECT_EQ(arena.at(2), 70);
  EXPECT_EQ(arena.used(), 100);
  EXPECT_FALSE(arena.Take(3, 1));
  EXPECT_EQ(arena.at(3), WeightArena::kNowhere);
  arena.Free(1);
  EXPECT_EQ(arena.used(), 60);
  EXPECT_FALSE(arena.Take(3, 41));
  ASSERT_TRUE(arena.Take(3, 40));
  EXPECT_EQ(arena.at(3), 30);
}

TEST(WeightArenaTest, CompactJoinsWhatIsFree) {
  WeightArena arena(100, 4);
  ASSERT_TRUE(arena.Take(0, 20) && arena.Take(1, 30) && arena.Take(2, 10));
  arena.Free(0);
  EXPECT_FALSE(arena.Take(0, 60));
  const std::vector<WeightArena::Move> moves = arena.Compact();
  ASSERT_EQ(moves.size(), 2u);
  EXPECT_EQ(moves[0].from, 20);
  EXPECT_EQ(moves[0].to, 0);
  EXPECT_EQ(moves[0].bytes, 30);
  EXPECT_EQ(moves[1].from, 50);
  EXPECT_EQ(moves[1].to, 30);
  EXPECT_EQ(moves[1].bytes, 10);
  ASSERT_TRUE(arena.Take(0, 60));
  EXPECT_EQ(arena.at(0), 40);
  EXPECT_TRUE(arena.Compact().empty());
}

TEST(WeightArenaTest, FreeOfAnEmptySlotChangesNothing) {
  WeightArena arena(10, 2);
  arena.Free(0);
  EXPECT_EQ(arena.used(), 0);
  ASSERT_TRUE(arena.Take(1, 10));
  EXPECT_EQ(arena.at(1), 0);
}

// Random sequences of calls: extents never overlap, sizes that fit by count always fit after
// Compact, and every byte follows the moves.
TEST(WeightArenaTest, KeepsBytesThroughRandomLives) {
  constexpr int kBytes = 200, kSlots = 8;
  std::mt19937 random(5);
  WeightArena arena(kBytes, kSlots);
  std::vector<int> memory(kBytes, -1), held(kSlots, 0);
  int compacted = 0;
  for (int life = 0; life < 4000; ++life) {
    const int slot = static_cast<int>(random() % kSlots);
    arena.Free(slot);
    held[slot] = 0;
    const int bytes = static_cast<int>(random() % 60) + 1;
    const int used = std::accumulate(held.begin(), held.end(), 0);
    ASSERT_EQ(arena.used(), used);
    if (!arena.Take(slot, bytes)) {
      if (used + bytes > kBytes) continue;
      ++compacted;
      for (const WeightArena::Move& m : arena.Compact()) {
        ASSERT_LT(m.to, m.from);
        for (int64_t i = 0; i < m.bytes; ++i) memory[m.to + i] = memory[m.from + i];
      }
      ASSERT_TRUE(arena.Take(slot, bytes));
    }
    held[slot] = bytes;
    ASSERT_GE(arena.at(slot), 0);
    ASSERT_LE(arena.at(slot) + bytes, kBytes);
    for (int i = 0; i < bytes; ++i) memory[arena.at(slot) + i] = slot;
    for (int s = 0; s < kSlots; ++s) {
      for (int i = 0; i < held[s]; ++i) ASSERT_EQ(memory[arena.at(s) + i], s) << life;
    }
  }
  EXPECT_GT(compacted, 20);
}

}  // namespace
}  // namespace mla::kernels::hip
