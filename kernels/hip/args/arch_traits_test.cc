// Tests which attention kernel a launch gets, and how combine is spread over the device. Every
// shape covers all of a row's columns, blocks run in one turn wherever they can, and only small
// launches divide rows.
#include "kernels/hip/args/arch_traits.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {
namespace {

constexpr int32_t kODim = 512;

class CombineShapeTest : public ::testing::TestWithParam<const ArchTraits*> {
 protected:
  const ArchTraits& arch() const { return *GetParam(); }
  int64_t Blocks(int64_t rows, int32_t waves) const {
    return (rows * waves + arch().waves_per_block - 1) / arch().waves_per_block;
  }
};

INSTANTIATE_TEST_SUITE_P(Archs, CombineShapeTest,
                         ::testing::Values(&kSm90Traits, &kGfx950Traits, &kGfx942Traits),
                         [](const auto& arch) { return std::string(arch.param->arch); });

TEST_P(CombineShapeTest, WavesOfARowDivideItsBlockAndHavePartsToMerge) {
  for (const int64_t rows : {1, 16, 128, 2048, 65536, 4194304}) {
    for (const int32_t parts : {1, 2, 3, 5, 8, 132}) {
      for (const int32_t units : {1, 8, 132, 304}) {
        const int32_t waves = CombineWavesPerRow(arch(), rows, parts, units);
        ASSERT_GE(waves, 1);
        ASSERT_EQ(arch().waves_per_block % waves, 0);
        ASSERT_LE(waves, std::max(1, parts));
        // There is more than one wave a row only if all blocks run at a time.
        if (waves > 1) {
          ASSERT_LE(Blocks(rows, waves), kCombineBlocksPerUnit * units);
        }
        // The number of waves is the largest that this allows.
        const int32_t more = 2 * waves;
        const bool possible = more <= arch().waves_per_block && more <= parts;
        if (possible) {
          ASSERT_GT(rows * more, kCombineBlocksPerUnit * units * arch().waves_per_block);
        }
      }
    }
  }
}

TEST_P(CombineShapeTest, ColumnBlocksCoverARowAndRunAtOneTime) {
  const int32_t lanes = 256 / arch().waves_per_block;
  for (const int64_t rows : {1, 8, 16, 64, 128, 512, 4096, 1 << 20}) {
    for (const int32_t units : {1, 8, 132, 304}) {
      for (const int32_t o_dim : {64, 128, 512}) {
        for (int32_t waves = 1; waves <= arch().waves_per_block; waves *= 2) {
          const int32_t blocks = CombineColumnBlocks(arch(), rows, waves, o_dim, units);
          ASSERT_GE(blocks, 1);
          ASSERT_EQ(blocks & (blocks - 1), 0) << "a power of two";
          if (blocks == 1) continue;
          // Each block has at least four columns a lane, and all blocks have columns.
          ASSERT_EQ(o_dim % blocks, 0);
          ASSERT_GE(o_dim / blocks, 4 * lanes);
          ASSERT_LE(blocks * (rows * waves / arch().waves_per_block),
                    kCombineBlocksPerUnit * units);
        }
      }
    }
  }
}

TEST_P(CombineShapeTest, FewRowsAreDividedAndManyAreNot) {
  constexpr int32_t kUnits = 132;
  const int32_t one = CombineWavesPerRow(arch(), 16, 64, kUnits);
  EXPECT_EQ(one, arch().waves_per_block) << "a row has a block of its own";
  EXPECT_GT(CombineColumnBlocks(arch(), 16, one, kODim, kUnits), 1);
  const int32_t many = CombineWavesPerRow(arch(), 65536, 64, kUnits);
  EXPECT_EQ(many, 1) << "a block takes as many rows as it has waves";
  EXPECT_EQ(CombineColumnBlocks(arch(), 65536, many, kODim, kUnits), 1);
  // More blocks of rows than units: dividing them would only add blocks.
  EXPECT_EQ(CombineColumnBlocks(arch(), kUnits + 1, arch().waves_per_block, kODim, kUnits), 1);
}

TEST(CombineShape, KnownLaunchesOfAnH200) {
  constexpr int32_t kUnits = 132;
  // One sequence of 128 heads whose context is in 64 parts: a block a row.
  EXPECT_EQ(CombineWavesPerRow(kSm90Traits, 128, 64, kUnits), 8);
  // 16 heads: 16 blocks of rows, each divided by four, are still fewer than the units take.
  EXPECT_EQ(CombineWavesPerRow(kSm90Traits, 16, 64, kUnits), 8);
  EXPECT_EQ(CombineColumnBlocks(kSm90Traits, 16, 8, kODim, kUnits), 4);
  // With two parts, six of eight waves would have no work.
  EXPECT_EQ(CombineWavesPerRow(kSm90Traits, 128, 2, kUnits), 2);
}

constexpr int32_t kUnits = 132;

int32_t RowsFor(const ArchTraits& arch, int32_t rows, int32_t busy) {
  return arch
      .attend[ChooseAttend(arch, KvFormat::kBf16, DType::kBf16, AttentionKind::kDense, rows, busy,
                           kUnits)]
      .rows;
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
    EXPECT_EQ(RowsFor(*arch, 128, 1), RowsFor(*arch, 128, kUnits));
  }
}

TEST(ChooseAttend, TakesProductsOfEightBitsWhereThereIsAKernel) {
  for (const AttentionKind kind : {AttentionKind::kDense, AttentionKind::kSparse}) {
    const auto chosen = [&](const ArchTraits& arch, DType products, int32_t rows) {
      return arch
          .attend[ChooseAttend(arch, KvFormat::kFp8Row, products, kind, rows, kUnits, kUnits)];
    };
    EXPECT_EQ(chosen(kSm90Traits, DType::kFp8E4m3, 17).products, DType::kFp8E4m3);
    EXPECT_EQ(chosen(kSm90Traits, DType::kFp8E4m3, 128).products, DType::kFp8E4m3);
    EXPECT_EQ(chosen(kSm90Traits, DType::kFp8E4m3, 16).products, DType::kBf16);
    EXPECT_EQ(chosen(kSm90Traits, DType::kBf16, 128).products, DType::kBf16);
    EXPECT_EQ(chosen(kGfx950Traits, DType::kFp8E4m3, 64).products, DType::kBf16);
    EXPECT_EQ(chosen(kGfx950Traits, DType::kFp8E4m3, 65).products, DType::kFp8E4m3);
    EXPECT_EQ(chosen(kGfx950Traits, DType::kFp8E4m3, 65).rows, 128);
    EXPECT_EQ(chosen(kGfx950Traits, DType::kBf16, 128).rows, 64);
    for (const KvFormat format : {KvFormat::kFp8Row, KvFormat::kFp8Tensor}) {
      EXPECT_EQ(AbsorbedProducts(kGfx950Traits, format, DType::kFp8E4m3, kind), DType::kFp8E4m3);
    }
    for (const ArchTraits* arch : {&kGfx950Traits, &kGfx942Traits}) {
      for (const int32_t rows : {1, 64, 65, 128}) {
        const size_t i =
            ChooseAttend(*arch, KvFormat::kFp8Tensor, DType::kFp8E4m3, kind, rows, kUnits, kUnits);
        const AttendVariant& v = arch->attend[i];
        EXPECT_EQ(v.rows, rows > 64 ? 128 : 64);
        const bool codes = rows > 64 || arch == &kGfx942Traits;  // widening takes long on it
        EXPECT_EQ(v.products, codes ? DType::kFp8E4m3 : DType::kBf16);
      }
    }
    EXPECT_EQ(AbsorbedProducts(kGfx942Traits, KvFormat::kFp8Row, DType::kFp8E4m3, kind),
              DType::kBf16);
  }
  for (const ArchTraits* arch : {&kSm90Traits, &kGfx950Traits, &kGfx942Traits}) {
    const bool some =
        std::any_of(arch->attend.begin(), arch->attend.end(),
                    [](const AttendVariant& v) { return v.products == DType::kFp8E4m3; });
    EXPECT_EQ(arch->fp8_compute.empty(), !some) << arch->arch;
  }
}

std::string SplitFor(KvFormat format, DType products, AttentionKind kind, int32_t pieces) {
  const ArchTraits& arch = kSm90Traits;
  const size_t chosen = ChooseAttend(arch, format, products, kind, 128, pieces, kUnits);
  const size_t split = FindReplacement(arch.split, arch.attend[chosen]);
  return split < arch.split.size() ? arch.split[split].kernel : "";
}

TEST(FindReplacement, HasTheRowsFormatAndProductsOfTheKernelItReplaces) {
  constexpr AttentionKind kDense = AttentionKind::kDense;
  constexpr DType kCodes = DType::kFp8E4m3;
  EXPECT_EQ(SplitFor(KvFormat::kBf16, DType::kBf16, kDense, 16), "mla_split_16");
  EXPECT_EQ(SplitFor(KvFormat::kBf16, DType::kBf16, kDense, 66), "mla_split_64");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Row, kCodes, kDense, 16), "mla_split_16_fp8_row");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Row, DType::kBf16, kDense, 16), "mla_split_16_fp8_row");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Row, kCodes, kDense, 66), "mla_split_64_fp8_row_products");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Tensor, kCodes, kDense, 16), "mla_split_16_fp8_tensor");
  // No such kernels: widened rows, products of 8 bits over fp8_tensor, lists.
  EXPECT_EQ(SplitFor(KvFormat::kFp8Row, DType::kBf16, kDense, 66), "");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Tensor, kCodes, kDense, 66), "");
  EXPECT_EQ(SplitFor(KvFormat::kFp8Row, kCodes, AttentionKind::kSparse, 16), "");
  EXPECT_EQ(SplitFor(KvFormat::kBf16, DType::kBf16, AttentionKind::kSparse, 16), "");
  for (const FormatVariant& v : kSm90Traits.split) {
    EXPECT_TRUE(v.format == KvFormat::kBf16 ||
                LeastRows(kSm90Traits, v.format, kCodes, kDense) == 16)
        << v.kernel;
  }
}

TEST(FindReplacement, HasBoxesForRowsByPositionOfTheLargestKernels) {
  const ArchTraits& arch = kSm90Traits;
  std::set<std::string> replaced;
  for (const AttendVariant& v : arch.attend) {
    const size_t boxes = FindReplacement(arch.boxes, v);
    if (boxes == arch.boxes.size()) continue;
    EXPECT_EQ(arch.boxes[boxes].kernel, absl::StrCat(v.kernel, "_boxes"));
    EXPECT_EQ(arch.boxes[boxes].threads, v.threads);
    EXPECT_EQ(arch.boxes[boxes].shared_bytes, v.shared_bytes);
    replaced.insert(v.kernel);
  }
  const std::set<std::string> want = {"mla_attend_64", "mla_attend_64_fp8_row_products",
                                      "mla_attend_64_fp8_tensor_products"};
  EXPECT_EQ(replaced, want);
}

TEST(PartOrder, OfCodesFromRegistersIsPairedAndOnSm90Only) {
  for (const AttendVariant& v : kSm90Traits.attend) {
    const bool codes = v.format != KvFormat::kBf16 && v.format != KvFormat::kFp8Page;
    const bool transposed = codes && (v.rows == 16 || v.products == DType::kFp8E4m3);
    const PartOrder others = v.rows == 16 ? PartOrder::kColumns : PartOrder::kExchanged;
    EXPECT_EQ(v.order, transposed ? PartOrder::kPaired : others) << v.kernel;
  }
  for (const ArchTraits* arch : {&kGfx950Traits, &kGfx942Traits}) {
    for (const AttendVariant& v : arch->attend) EXPECT_EQ(v.order, PartOrder::kColumns) << v.kernel;
  }
}

TEST(AttendsFewTiles, GoesByTheMeanOfTheItems) {
  const int64_t limit = kSm90Traits.few_tiles_rows;
  ASSERT_GT(limit, 0);
  EXPECT_TRUE(AttendsFewTiles(kSm90Traits, 0, 1));
  EXPECT_TRUE(AttendsFewTiles(kSm90Traits, 66 * limit, 66));
  EXPECT_FALSE(AttendsFewTiles(kSm90Traits, 66 * limit + 1, 66));
}

// ChooseAttend, MostRows and the report rely on this order and these names.
TEST(Variants, AreInOrderAndNamedByWhatTheyDo) {
  for (const ArchTraits* arch : {&kSm90Traits, &kGfx950Traits, &kGfx942Traits}) {
    std::set<std::string> names;
    for (const AttendVariant& v : arch->attend) {
      names.insert(v.kernel);
      std::string want = kAttendPrefix + std::to_string(v.rows);
      if (v.format != KvFormat::kBf16) want += std::string("_") + Name(v.format);
      if (v.products == DType::kFp8E4m3) want += "_products";
      if (v.attention == AttentionKind::kSparse) want += "_lists";
      if (v.attention == AttentionKind::kWindow) want += "_window";
      EXPECT_EQ(v.kernel, want);
      EXPECT_GE(MostRows(*arch, v.format, v.products, v.attention), v.rows);
      for (const AttendVariant& next : arch->attend) {
        if (&next > &v && next.Serves(v.format, v.products, v.attention)) {
          EXPECT_GT(next.rows, v.rows);
        }
      }
    }
    EXPECT_EQ(names.size(), arch->attend.size());
    for (const ExpandVariant& v : arch->expand) {
      std::string want = v.dims == kDims128 ? "mla_expand" : "mla_expand_256";
      if (v.format != KvFormat::kBf16) absl::StrAppend(&want, "_", Name(v.format));
      if (v.products != DType::kBf16) want += "_products";
      EXPECT_EQ(v.kernel, want);
      EXPECT_EQ(&arch->expand[FindExpand(*arch, v.dims, v.format, v.products)], &v);
      EXPECT_LT(FindExpanded(*arch, v.dims, v.products), arch->expanded.size()) << v.kernel;
    }
  }
}

TEST(ExpandedVariants, DimsHaveUpProjectionAndAttention) {
  for (const ArchTraits* arch : {&kSm90Traits, &kGfx950Traits, &kGfx942Traits}) {
    for (const ExpandedVariant& v : arch->expanded) {
      std::string want = v.dims == kDims128 ? "mla_attend_expanded" : "mla_attend_expanded_256";
      if (v.products != DType::kBf16) want += "_products";
      EXPECT_EQ(v.kernel, want);
      EXPECT_EQ(&arch->expanded[FindExpanded(*arch, v.dims, v.products)], &v);
      const bool expands = std::any_of(
          arch->expand.begin(), arch->expand.end(),
          [&](const ExpandVariant& e) { return e.dims == v.dims && e.products == v.products; });
      EXPECT_TRUE(expands) << v.kernel;
    }
    EXPECT_TRUE(HasExpandedForm(*arch, kDims128));
    EXPECT_TRUE(HasExpandedForm(*arch, kDims256));
    EXPECT_FALSE(HasExpandedForm(*arch, {192, 128}));
    EXPECT_EQ(arch->expanded_products_keys > 0,
              FindExpanded(*arch, kDims128, DType::kFp8E4m3) < arch->expanded.size());
  }
}

TEST(ExpandedVariants, TheWorkspaceIsForTheLargestDimsThatModelsMayHave) {
  EXPECT_EQ(LargestDims(kSm90Traits, {1, 512, 64, 256, 256}), kDims256);
  EXPECT_EQ(LargestDims(kSm90Traits, {1, 512, 64, 192, 256}), kDims256);
  EXPECT_EQ(LargestDims(kSm90Traits, {1, 512, 64, 191, 256}), kDims128);
  EXPECT_EQ(LargestDims(kSm90Traits, {1, 512, 64, 256, 255}), kDims128);
  EXPECT_EQ(LargestDims(kGfx950Traits, {1, 512, 64, 256, 256}), kDims256);
  EXPECT_EQ(LargestDims(kGfx942Traits, {1, 512, 64, 128, 256}), kDims128);
}

TEST(ExpandedVariants, ABlockOfWiderHeadsHasItsUnitToItself) {
  for (const ArchTraits* arch : {&kSm90Traits, &kGfx950Traits, &kGfx942Traits}) {
    const auto blocks = [&](const kernels::ExpandedDims& dims) {
      return arch->expanded[FindExpanded(*arch, dims, DType::kBf16)].blocks;
    };
    EXPECT_EQ(blocks(kDims256), 1) << arch->arch;
    EXPECT_EQ(blocks(kDims128), MostExpandedBlocks(*arch)) << arch->arch;
    EXPECT_EQ(MostExpandedBlocks(*arch), arch == &kSm90Traits ? 1 : 2);
  }
}

TEST(BlocksOfUnit, LetsBlocksShareTheRowsOf128Heads) {
  const auto blocks = [](const ArchTraits& arch, KvFormat format, AttentionKind kind) {
    return BlocksOfUnit(arch, MostRows(arch, format, DType::kBf16, kind));
  };
  constexpr AttentionKind kDense = AttentionKind::kDense, kWindow = AttentionKind::kWindow;
  EXPECT_EQ(blocks(kGfx950Traits, KvFormat::kBf16, kDense), 1);
  EXPECT_EQ(blocks(kGfx950Traits, KvFormat::kFp8Tensor, kDense), 1);
  EXPECT_EQ(blocks(kGfx950Traits, KvFormat::kFp8Row, kDense), 2);
  EXPECT_EQ(blocks(kGfx950Traits, KvFormat::kFp8Page, kWindow), 2);
  EXPECT_EQ(blocks(kGfx950Traits, KvFormat::kBf16, kWindow), 1);
  EXPECT_EQ(blocks(kGfx942Traits, KvFormat::kBf16, kDense), 2);
  EXPECT_EQ(blocks(kSm90Traits, KvFormat::kBf16, kDense), 2);
}

TEST(PlaceOf, EveryShareOfEveryUnitHasOneBlock) {
  for (const int32_t xcds : {0, 1, 6, 8}) {
    for (const int32_t per_unit : {1, 2, 8}) {
      for (const int32_t units : {1, 3, 8, 9, 16, 152, 153, 256}) {
        std::set<std::pair<int32_t, int32_t>> places;
        for (int32_t b = 0; b < units * per_unit; ++b) {
          const BlockPlace place = PlaceOf(b, units * per_unit, per_unit, xcds);
          ASSERT_TRUE(place.unit >= 0 && place.unit < units) << b;
          ASSERT_TRUE(place.share >= 0 && place.share < per_unit) << b;
          places.insert({place.unit, place.share});
        }
        ASSERT_EQ(places.size(), static_cast<size_t>(units * per_unit)) << xcds << " " << units;
      }
    }
  }
}

TEST(PlaceOf, SharesOfAUnitAndNeighboursAreOnOneDie) {
  constexpr int32_t kXcds = 8, kPerUnit = 2, kBlocks = 304;
  std::vector<std::set<int32_t>> dies(kBlocks / kPerUnit);
  for (int32_t b = 0; b < kBlocks; ++b) {
    const BlockPlace place = PlaceOf(b, kBlocks, kPerUnit, kXcds);
    dies[static_cast<size_t>(place.unit)].insert(b % kXcds);
  }
  for (size_t unit = 0; unit < dies.size(); ++unit) {
    EXPECT_EQ(dies[unit], std::set<int32_t>{static_cast<int32_t>(unit) / 19}) << unit;
  }
}

TEST(XcdsOf, CountsWholeDies) {
  EXPECT_EQ(XcdsOf(kGfx950Traits, 256), 8);
  EXPECT_EQ(XcdsOf(kGfx942Traits, 304), 8);
  EXPECT_EQ(XcdsOf(kGfx942Traits, 228), 6);
  EXPECT_EQ(XcdsOf(kGfx942Traits, 38), 1);
  EXPECT_EQ(XcdsOf(kGfx942Traits, 100), 1);  // no known number of dies
  EXPECT_EQ(XcdsOf(kSm90Traits, 132), 1);
}

TEST(ExpandBlocks, HaveWholeTilesOrEqualPartsWhereThatCostsLittle) {
  const auto blocks = [](int32_t tiles, int32_t heads, int32_t expansions = 1) {
    return ExpandBlocks(kSm90Traits, tiles * heads, heads * expansions, expansions, kUnits);
  };
  EXPECT_EQ(blocks(32, 128), 128);       // 32 heads each, where 31.03 would do
  EXPECT_EQ(blocks(128, 64), 128);       // one tile each
  EXPECT_EQ(blocks(4 * 8, 32, 4), 128);  // 8 heads each, of four requests
  EXPECT_EQ(blocks(1, 10), 10);
  EXPECT_EQ(blocks(40, 20), kUnits);  // 10 heads each, where 6.06 would do
  EXPECT_EQ(ExpandBlocks(kSm90Traits, 40 * 20, 39, 2, kUnits), kUnits);  // unlike requests
  EXPECT_EQ(ExpandBlocks(kGfx950Traits, 32 * 128, 128, 1, 256), 256);    // rows are not kept
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
  // 64 parts need 8 waves to be taken at one go.
  EXPECT_EQ(CombineWavesBeside(kSm90Traits, kRows, 64, 8, kBlocks, 100), 8);
  // On AMD no kernel waits next to another one.
  EXPECT_EQ(CombineWavesBeside(kGfx950Traits, kRows, kParts, 4, kBlocks, 100), 4);
}

TEST(WidensLists, WhereRowsAreReadTwiceByBlocksThatWidenThem) {
  constexpr auto kRow = KvFormat::kFp8Row;
  EXPECT_TRUE(WidensLists(kSm90Traits, kRow, 128, 200, 100));
  EXPECT_FALSE(WidensLists(kSm90Traits, kRow, 128, 199, 100));
  EXPECT_FALSE(WidensLists(kSm90Traits, kRow, 16, 200, 100));
  EXPECT_FALSE(WidensLists(kSm90Traits, KvFormat::kFp8Tensor, 128, 200, 100));
  EXPECT_FALSE(WidensLists(kSm90Traits, KvFormat::kBf16, 128, 200, 100));
  EXPECT_FALSE(WidensLists(kGfx950Traits, kRow, 128, 200, 100));
}

TEST(IndexKeysPerBlock, IsLargestWhereAllUnitsStillHaveBlocks) {
  EXPECT_EQ(IndexKeysPerBlock(kSm90Traits, 1, kUnits), 256);
  EXPECT_EQ(IndexKeysPerBlock(kSm90Traits, 16 * 65536, kUnits), 4096);
  EXPECT_EQ(IndexKeysPerBlock(kSm90Traits, 64 * 65536, kUnits), 16384);
  EXPECT_EQ(IndexKeysPerBlock(kSm90Traits, int64_t{1} << 40, kUnits), 16384);
  EXPECT_EQ(IndexKeysPerBlock(kGfx950Traits, 16 * 65536, kUnits), 2048);
  EXPECT_EQ(IndexKeysPerBlock(kGfx950Traits, int64_t{1} << 40, kUnits), 8192);
}

}  // namespace
}  // namespace mla::kernels::hip
