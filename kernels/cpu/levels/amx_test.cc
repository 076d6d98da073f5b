// Tests the call for a whole tile, emulated, and with the real instructions where the machine has
// them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/formats/dtype.h"

namespace mla::kernels::cpu {
namespace {

// Operands of a whole tile, as the attention of an item makes them: key rows evenly spaced or not,
// NaN after each, queries packed, state in the middle of a sequence.
class WholeTile {
 public:
  WholeTile(const KernelSet& kernels, std::mt19937& random, int32_t rows, int32_t packed, int32_t k,
            int32_t d, bool even)
      : columns_((packed + kPanel - 1) / kPanel * kPanel), d_(d) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const int32_t stride = k + 16;
    keys_.assign(static_cast<size_t>((rows + 8) * stride), 0xffff);
    for (int32_t r = 0; r < rows; ++r) {
      // Every seventh row of an uneven tile lies a line further.
      uint16_t* const row = keys_.data() + r * stride + (!even && r % 7 == 6 ? 32 : 0);
      for (int32_t i = 0; i < k; ++i) row[i] = ToBf16(normal(random));
      rows_.push_back(row);
    }
    const int64_t panel_bytes = PanelBytes(true, kernels.k_align, k);
    queries_.resize(static_cast<size_t>(columns_ / kPanel * panel_bytes / 2));
    for (Bf16& value : queries_) value = ToBf16(0.1f * normal(random));
    visible_.resize(static_cast<size_t>(columns_));
    for (int32_t n = 0; n < columns_; ++n) visible_[static_cast<size_t>(n)] = n * rows / columns_;
    tile_.gemm.a_rows = rows_.data();
    tile_.gemm.rows = rows;
    tile_.gemm.k = k;
    tile_.gemm.b = queries_.data();
    tile_.gemm.panel_bytes = panel_bytes;
    tile_.gemm.panels = columns_ / kPanel;
    tile_.gemm.ldc = columns_ + kPanel;
    tile_.gemm.next_rows = rows_.data();
    tile_.gemm.next_count = rows;
    tile_.gemm.next_bytes = 2 * k;
    tile_.softmax.lds = tile_.gemm.ldc;
    tile_.softmax.rows = rows;
    tile_.softmax.columns = columns_;
    tile_.softmax.scale2 = 0.3f;
    tile_.accumulate.rows = rows;
    tile_.accumulate.columns = columns_;
    tile_.accumulate.packed_rows = packed;
    tile_.accumulate.ldv = kMostKvRows / 2 * 64 + 64;
    tile_.accumulate.panels = (d + kPanel - 1) / kPanel;
    tile_.accumulate.ldo = tile_.accumulate.panels * kPanel + kPanel;
  }

  // Everything that a tile leaves.
  struct Left {
    std::vector<float> m, l, norm, alpha, o;
    std::vector<uint16_t> values;
    // Returns true if all bits are equal, so a NaN equals itself.
    bool operator==(const Left& b) const {
      return SameBits(m, b.m) && SameBits(l, b.l) && SameBits(norm, b.norm) &&
             SameBits(alpha, b.alpha) && SameBits(o, b.o) && values == b.values;
    }
    static bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
      });
    }
  };

  // Makes all elements of a key row NaN.
  void SetNan(int32_t row) {
    auto* const keys = const_cast<void*>(rows_[static_cast<size_t>(row)]);
    std::fill_n(static_cast<uint16_t*>(keys), tile_.gemm.k, ToBf16(std::nanf("")));
  }
  // Sets how many rows of the next tile are fetched, at most the tile's rows.
  void SetNextCount(int32_t count) { tile_.gemm.next_count = count; }

  // Runs the tile, in one call or function by function.
  Left Run(const KernelSet& kernels, bool whole, bool masked, bool first, bool packed_before) {
    const auto columns = static_cast<size_t>(columns_);
    std::vector<float> s(static_cast<size_t>(kMostKvRows) * (columns + kPanel)),
        p(static_cast<size_t>(kTileRows) * kTileRows);
    Left results{std::vector<float>(columns, 0.25f),
                 std::vector<float>(columns, 3.0f),
                 std::vector<float>(columns, 3.0f),
                 std::vector<float>(columns),
                 std::vector<float>(columns * static_cast<size_t>(tile_.accumulate.ldo), 2.0f),
                 std::vector<uint16_t>(
                     static_cast<size_t>(tile_.accumulate.panels * tile_.accumulate.ldv / 2))};
    results.m[0] = 1e3f;  // a maximum that stays
    TileArgs tile = tile_;
    tile.gemm.c = s.data();
    tile.softmax.s = s.data();
    tile.softmax.m = results.m.data();
    tile.softmax.l = results.l.data();
    tile.softmax.norm = results.norm.data();
    tile.softmax.alpha = results.alpha.data();
    tile.softmax.p = p.data();
    tile.softmax.visible = masked ? visible_.data() : nullptr;
    tile.accumulate.p = p.data();
    tile.accumulate.v = results.values.data();
    tile.accumulate.o = results.o.data();
    tile.accumulate.alpha = first ? nullptr : results.alpha.data();
    if (!packed_before && whole) {
      tile.gemm.value_panels = results.values.data();
      tile.gemm.value_panel_bytes = tile.accumulate.ldv;
      tile.gemm.value_dim = d_;
    }
    if (packed_before || !whole) {
      kernels.pack_values(reinterpret_cast<const uint16_t* const*>(rows_.data()), tile.gemm.rows,
                          d_, results.values.data(), tile.accumulate.ldv);
    }
    if (whole) {
      kernels.attend(tile);
    } else {
      kernels.gemm(tile.gemm);
      kernels.softmax(tile.softmax);
      kernels.accumulate(tile.accumulate);
    }
    return results;
  }

 private:
  int32_t columns_, d_;
  std::vector<uint16_t> keys_;
  std::vector<const void*> rows_;
  std::vector<Bf16> queries_;
  std::vector<int32_t> visible_;
  TileArgs tile_{};
};

class WholeTileTest : public testing::TestWithParam<const KernelSet*> {
 protected:
  void SetUp() override { GetParam()->enter_thread(); }
  void TearDown() override { GetParam()->leave_thread(); }
};

// A tile in one call equals its stages one by one, bit by bit, wherever its rows lie and whatever
// its sizes are.
TEST_P(WholeTileTest, EqualsItsStages) {
  const KernelSet& kernels = *GetParam();
  std::mt19937 random(42);
  for (const int32_t rows : {1, 32, 40, 64, 96, 128, 256}) {
    for (const int32_t packed : {5, 32, 40, 64, 100, 128}) {
      for (const auto& [k, d] : std::vector<std::pair<int32_t, int32_t>>{
               {32, 32}, {48, 40}, {224, 160}, {224, 176}, {576, 512}}) {
        if (k == 576 && (packed < 64 || rows != 64)) continue;  // the emulation is slow
        for (const bool even : {true, false}) {
          WholeTile tile(kernels, random, rows, packed, k, d, even);
          for (const int variant : {0, 1, 2, 5}) {
            tile.SetNextCount(variant == 0 ? rows : std::min(variant - 1, rows));
            const bool masked = (variant & 1) != 0, first = (variant & 2) != 0;
            const bool packed_before = (variant & 4) != 0;
            const auto want = tile.Run(kernels, false, masked, first, packed_before);
            const auto got = tile.Run(kernels, true, masked, first, packed_before);
            ASSERT_EQ(got.m, want.m) << rows << " rows, " << packed << " packed, k " << k;
            ASSERT_EQ(got.l, want.l) << rows << " rows, " << packed << " packed, k " << k;
            ASSERT_TRUE(got == want) << rows << " rows, " << packed << " packed, k " << k
                                     << (even ? ", even" : "") << ", variant " << variant;
          }
        }
      }
    }
  }
}

// NaN reaches the same results, bit by bit, and no other ones.
TEST_P(WholeTileTest, EqualsItsStagesWithAKeyOfNan) {
  const KernelSet& kernels = *GetParam();
  std::mt19937 random(43);
  for (const int32_t rows : {32, 40, 256}) {
    for (const bool even : {true, false}) {
      WholeTile tile(kernels, random, rows, 100, 96, 64, even);
      const auto finite = tile.Run(kernels, false, true, false, false);
      tile.SetNan(rows / 2);
      for (const int32_t next_count : {0, 1, rows}) {
        tile.SetNextCount(next_count);
        const auto want = tile.Run(kernels, false, true, false, false);
        const auto got = tile.Run(kernels, true, true, false, false);
        ASSERT_TRUE(got == want) << rows << " rows" << (even ? ", even" : "") << ", fetches "
                                 << next_count;
        // The last packed row sees the key of NaN, the first one sees no key.
        EXPECT_TRUE(std::isnan(got.l[99])) << rows;
        EXPECT_EQ(got.l[0], finite.l[0]) << rows;
      }
    }
  }
}

std::vector<const KernelSet*> LevelsWithWholeTiles() {
  std::vector<const KernelSet*> levels = {&kEmulatedAmxKernels};
  for (const KernelSet* level : UsableLevels()) {
    if (level->attend != nullptr) levels.push_back(level);
  }
  return levels;
}

INSTANTIATE_TEST_SUITE_P(Levels, WholeTileTest, testing::ValuesIn(LevelsWithWholeTiles()),
                         [](const auto& info) {
                           return std::string(info.index == 0 ? "emulated_" : "") +
                                  info.param->name;
                         });

}  // namespace
}  // namespace mla::kernels::cpu
