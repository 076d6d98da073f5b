#include "client/cpp/cluster/row_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace mla::client {
namespace {

using Places = std::vector<uint32_t>;

v1::ModelSpec Model() {
  v1::ModelSpec model;
  model.mutable_geometry()->set_num_heads(4);
  model.mutable_geometry()->set_kv_lora_rank(32);
  model.mutable_geometry()->set_rope_dim(16);
  model.mutable_geometry()->set_nope_dim(24);
  model.mutable_geometry()->set_v_dim(8);
  return model;
}

AttendCall Call(v1::Profile profile) {
  static float lse = 0;
  AttendCall call;
  call.profile = profile;
  call.num_heads = 2;
  call.kv = &lse;
  call.lse = &lse;
  return call;
}

TEST(FormsTest, AreOfTheProfileAndTheTypes) {
  AttendCall call = Call(v1::PROFILE_EXPANDED);
  CallForms forms = FormsOf(call, Model());
  EXPECT_EQ(forms.kv.bytes, 48u * 2);
  EXPECT_EQ(forms.q.bytes, 2u * (24 + 16) * 2);
  EXPECT_EQ(forms.o, 2u * 8 * 2);
  EXPECT_EQ(forms.lse, 2u * 4);
  call = Call(v1::PROFILE_ABSORBED);
  call.q_dtype = call.o_dtype = v1::DTYPE_F32;
  forms = FormsOf(call, Model());
  EXPECT_EQ(forms.q.bytes, 2u * 48 * 4);
  EXPECT_EQ(forms.o, 2u * 32 * 4);
  forms = FormsOf(Call(v1::PROFILE_APPEND_ONLY), Model());
  EXPECT_EQ(forms.q.bytes, 0u);
  EXPECT_EQ(forms.o, 0u);
}

TEST(FormsTest, TensorsOf8BitFloatsHaveTheirScalesAfterAllRows) {
  AttendCall call = Call(v1::PROFILE_ABSORBED);
  call.q_dtype = call.kv_row_dtype = v1::DTYPE_F8_E4M3;
  const v1::ModelSpec model = Model();
  const CallForms forms = FormsOf(call, model);
  EXPECT_EQ(forms.q.bytes, 2u * 48);
  EXPECT_EQ(forms.kv.bytes, 48u);
  // Rows taken out of a tensor are the rows' own tensor.
  std::vector<float> rows(3 * 48);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::ldexp(1.0f, static_cast<int>(i / 48) * 3);
  const std::vector<std::byte> all = EncodeFp8Rows(model, rows);
  std::vector<float> some(rows.begin(), rows.begin() + 48);
  some.insert(some.end(), rows.begin() + 96, rows.end());
  std::vector<std::byte> copy;
  TakeRows(forms.kv, all.data(), 3, Places{0, 2}, &copy);
  EXPECT_EQ(copy, EncodeFp8Rows(model, some));
  // Rows that lie together are not one piece of memory here.
  copy.clear();
  TakeRows(forms.kv, all.data(), 3, Places{0, 1}, &copy);
  EXPECT_EQ(copy.size(), Fp8RowBytes(model, 2));
}

TEST(RowsTest, ThatLieTogetherAreNotCopied) {
  std::vector<uint16_t> tensor(12);
  std::iota(tensor.begin(), tensor.end(), 0);
  std::vector<std::byte> copy;
  EXPECT_EQ(TakeRows({4, 0}, tensor.data(), 6, Places{2, 3, 4}, &copy), tensor.data() + 4);
  EXPECT_TRUE(copy.empty());
  EXPECT_EQ(TakeRows({4, 0}, nullptr, 6, Places{2, 3, 5}, &copy), nullptr);
  const auto* const taken =
      static_cast<const uint16_t*>(TakeRows({4, 0}, tensor.data(), 6, Places{0, 5}, &copy));
  EXPECT_EQ(std::vector<uint16_t>(taken, taken + 4), (std::vector<uint16_t>{0, 1, 10, 11}));
}

TEST(RowsTest, ArePutBackWhereTheyWere) {
  std::vector<uint16_t> tensor(8, 0);
  const std::vector<uint16_t> rows = {1, 2, 3, 4};
  PutRows(4, reinterpret_cast<const std::byte*>(rows.data()), Places{1, 3}, tensor.data());
  EXPECT_EQ(tensor, (std::vector<uint16_t>{0, 0, 1, 2, 0, 0, 3, 4}));
  const uint16_t pattern = 0x7fc0;
  FillRows(4, std::as_bytes(std::span(&pattern, 1)), Places{0}, tensor.data());
  EXPECT_EQ(tensor, (std::vector<uint16_t>{0x7fc0, 0x7fc0, 1, 2, 0, 0, 3, 4}));
}

TEST(ListsTest, FollowTheirRows) {
  const std::vector<int32_t> fixed = {0, 1, 2, 3, 4, 5};
  std::vector<int32_t> entries, begins;
  IndexLists lists = TakeLists({fixed.data(), 2, nullptr}, Places{1, 2}, &entries, &begins);
  EXPECT_EQ(lists.entries, fixed.data() + 2);
  lists = TakeLists({fixed.data(), 2, nullptr}, Places{0, 2}, &entries, &begins);
  EXPECT_EQ(entries, (std::vector<int32_t>{0, 1, 4, 5}));
  const std::vector<int32_t> begin = {0, 1, 3, 6};
  entries.clear();
  lists = TakeLists({fixed.data(), 0, begin.data()}, Places{1, 2}, &entries, &begins);
  EXPECT_EQ(entries, (std::vector<int32_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(begins, (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(lists.begin, begins.data());
  EXPECT_EQ(TakeLists({}, Places{1}, &entries, &begins).entries, nullptr);
}

}  // namespace
}  // namespace mla::client
