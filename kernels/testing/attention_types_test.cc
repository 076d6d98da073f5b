#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/formats/dtype.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/work_info.h"

namespace mla::kernels {
namespace {

TEST(Bf16Test, EveryValueComesBackFromItsFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<Bf16>(bits);
    const float wide = ToFloat(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToBf16(wide)))) << bits;
    } else {
      ASSERT_EQ(ToBf16(wide), value) << bits;
    }
  }
}

TEST(Bf16Test, RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(ToFloat(ToBf16(1.0f + 0x1.0p-8f)), 1.0f);               // a tie: down to even
  EXPECT_EQ(ToFloat(ToBf16(1.0f + 0x1.8p-7f)), 1.0f + 0x1.0p-6f);   // a tie: up to even
  EXPECT_EQ(ToFloat(ToBf16(1.0f + 0x1.02p-8f)), 1.0f + 0x1.0p-7f);  // just above a tie
  EXPECT_EQ(ToFloat(ToBf16(std::numeric_limits<float>::max())), INFINITY);
  EXPECT_EQ(ToFloat(ToBf16(-INFINITY)), -INFINITY);
  EXPECT_TRUE(std::signbit(ToFloat(ToBf16(-0.0f))));
}

TEST(Bf16Test, NanWhosePayloadWouldRoundAwayStaysNan) {
  EXPECT_TRUE(std::isnan(ToFloat(ToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(ToFloat(ToBf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(WorkInfoTest, HeadRangesPackAndUnpack) {
  for (const auto& [begin, end] : {std::pair{0, 1}, {7, 128}, {65534, 65535}, {0, 65535}}) {
    WorkInfo work{};
    work.heads = PackHeads(begin, end);
    EXPECT_EQ(work.head_begin(), begin);
    EXPECT_EQ(work.head_end(), end);
    ReduceTile tile{};
    tile.heads = PackHeads(begin, end);
    EXPECT_EQ(tile.head_begin(), begin);
    EXPECT_EQ(tile.head_end(), end);
  }
}

TEST(AttentionDescTest, NamesEveryField) {
  AttentionDesc desc;
  desc.geometry = {128, 512, 64, 100, 99};
  desc.form = AttentionForm::kExpanded;
  desc.o_dtype = DType::kF32;
  desc.page_size = 3;
  EXPECT_EQ(ToString(desc),
            "expanded heads=128 lora=512 rope=64 nope=100 v=99 q=bf16 o=fp32 kv=bf16 page=3");
  EXPECT_EQ(desc.geometry.kv_row_dim(), 576);
  EXPECT_EQ(desc.geometry.absorbed_q_dim(), 576);
  EXPECT_EQ(desc.geometry.expanded_q_dim(), 164);
}

}  // namespace
}  // namespace mla::kernels
