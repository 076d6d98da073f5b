#include "proto/wire/attend_layout.h"

#include "gtest/gtest.h"

namespace mla::wire {
namespace {

TEST(AttendLayoutTest, TensorsBeginAtAlignedOffsetsAfterEachOther) {
  const AttendLayout layout({.kv = 65, .q = 128, .lists = 4, .o = 64, .lse = 12, .lists_out = 20});
  EXPECT_EQ(layout.q, 128u);
  EXPECT_EQ(layout.lists, 256u);
  EXPECT_EQ(layout.inputs.bytes(), 260u);
  EXPECT_EQ(layout.lse, 64u);
  EXPECT_EQ(layout.lists_out, 128u);
  EXPECT_EQ(layout.outputs.bytes(), 148u);
}

TEST(AttendLayoutTest, EmptyTensorsTakeNoBytes) {
  const AttendLayout without_kv({.q = 100, .lists = 8});
  EXPECT_EQ(without_kv.q, 0u);
  EXPECT_EQ(without_kv.lists, 128u);
  const AttendLayout kv_alone({.kv = 70});
  EXPECT_EQ(kv_alone.inputs.bytes(), 70u);
  const AttendLayout without_q({.kv = 70, .lists = 8});
  EXPECT_EQ(without_q.lists, 128u);
  EXPECT_EQ(without_q.inputs.bytes(), 136u);
  const AttendLayout without_lse({.o = 70, .lists_out = 4});
  EXPECT_EQ(without_lse.lists_out, 128u);
  EXPECT_EQ(AttendLayout({}).outputs.bytes(), 0u);
}

TEST(TensorRowTest, GoesOnAfterALayout) {
  AttendLayout layout({.kv = 64, .q = 1});
  EXPECT_EQ(layout.inputs.Append(3), 128u);
  EXPECT_EQ(layout.inputs.Append(0), 192u);
  EXPECT_EQ(layout.inputs.bytes(), 131u);
}

}  // namespace
}  // namespace mla::wire
