// Which attention kernel a launch gets, and how combine goes beside it.
#include <gtest/gtest.h>

#include "kernels/hip/arch_traits.h"

namespace mla::gpu {
namespace {

constexpr int32_t kUnits = 132;

int32_t RowsFor(const ArchTraits& arch, int32_t rows, int32_t busy) {
  return arch.attend[ChooseAttend(arch, rows, busy, kUnits)].rows;
}

TEST(ChooseAttend, TakesTheSmallestKernelThatHoldsAnItem) {
  EXPECT_EQ(RowsFor(kSm90Traits, 16, kUnits), 16);
  EXPECT_EQ(RowsFor(kSm90Traits, 17, kUnits), 64);
  EXPECT_EQ(RowsFor(kSm90Traits, 128, kUnits / 2), 64);
  EXPECT_EQ(RowsFor(kGfx950Traits, 64, kUnits), 64);
  EXPECT_EQ(RowsFor(kGfx950Traits, 65, kUnits), 128);
  EXPECT_EQ(RowsFor(kGfx942Traits, 128, kUnits), 64);
}

TEST(ChooseAttend, SpreadsFewItemsWhereAllBlocksRunAtATime) {
  EXPECT_EQ(RowsFor(kSm90Traits, 128, 16), 16);  // 16 x 8 blocks
  EXPECT_EQ(RowsFor(kSm90Traits, 128, 17), 64);
  EXPECT_EQ(RowsFor(kSm90Traits, 64, 33), 16);
  EXPECT_EQ(RowsFor(kSm90Traits, 64, 34), 64);
  for (const ArchTraits* arch : {&kGfx950Traits, &kGfx942Traits}) {
    EXPECT_EQ(ChooseAttend(*arch, 128, 1, kUnits), ChooseAttend(*arch, 128, kUnits, kUnits));
  }
}

TEST(CombineWavesBeside, GivesUpWavesOnlyForBlocksThatStartEarly) {
  constexpr int32_t kRows = 128, kParts = 16, kBlocks = 4;
  // 512 blocks of 8 waves; 100 idle units hold 400.
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, kParts, 8, kBlocks, 100), 4);
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, kParts, 8, kBlocks, kUnits), 8);
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, kParts, 8, kBlocks, 40), 2);
  // Not even one go of parts a wave would fit.
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, kParts, 8, kBlocks, 20), 8);
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, kParts, 8, kBlocks, 0), 8);
  // 64 parts want 8 waves at one go.
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, 64, 8, kBlocks, 100), 8);
  // Nothing waits beside another kernel there.
  EXPECT_EQ(CombineWavesBeside(kGfx950Traits, kRows, kParts, 4, kBlocks, 100), 4);
}

}  // namespace
}  // namespace mla::gpu
