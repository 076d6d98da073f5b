#include "kernels/hip/device_state/weight_panels.h"

#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels::hip {
namespace {

TEST(PackPanels, PutsEachChunkWhereItsRowHasIt) {
  constexpr int32_t kRows = 16, kColumns = 192;
  std::vector<Bf16> from(size_t{kRows} * kColumns), to(from.size(), 0xffff);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<Bf16>(i);
  PackPanels(from.data(), to.data(), kRows, kColumns);
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t column = 0; column < kColumns; ++column) {
      const int32_t panel = column / 64, chunk = column % 64 / 8;
      const int32_t at = (panel * kRows + row) * 64 + (chunk ^ row % 8) * 8 + column % 8;
      EXPECT_EQ(to[static_cast<size_t>(at)], row * kColumns + column) << row << " " << column;
    }
  }
  std::vector<Bf16> back(from.size(), 0xffff);
  UnpackPanels(to.data(), back.data(), kRows, kColumns);
  EXPECT_EQ(back, from);
}

}  // namespace
}  // namespace mla::kernels::hip
