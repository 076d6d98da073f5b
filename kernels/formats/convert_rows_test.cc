#include "kernels/formats/convert_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace mla::kernels {
namespace {

constexpr int32_t kLatent = 130, kRope = 6, kRows = 5;

class ConvertRowsTest : public testing::TestWithParam<std::tuple<KvFormat, Fp8Kind>> {
 protected:
  ConvertRowsTest() : bytes_(static_cast<size_t>(KvPageBytes(layout_, layout_.row_bytes, kRows))) {
    std::vector<float> values(kLatent + kRope);
    for (int32_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 60.5f;
      Encode(row, values);
    }
  }
  void Encode(int32_t row, const std::vector<float>& values) {
    EncodeKvRow(layout_, kind_, values.data(), DType::kF32, 1.0f, Place(row));
  }
  KvRowPlace<std::byte> Place(int32_t row) {
    return KvRowIn(layout_, bytes_.data(), layout_.row_bytes, kRows, row);
  }
  std::byte* Row(int32_t row) { return Place(row).row; }
  std::vector<float> Decoded(int32_t row) {
    std::vector<float> values(kLatent + kRope);
    DecodeKvRow(layout_, kind_, 1.0f, {Place(row).row, Place(row).scales}, values.data());
    return values;
  }

  const Fp8Kind kind_ = std::get<1>(GetParam());
  const KvRowLayout layout_ = MakeKvRowLayout(std::get<0>(GetParam()), kLatent, kRope);
  std::vector<std::byte> bytes_;
};

TEST_P(ConvertRowsTest, RowsOfTheOtherKindStandForTheSameValues) {
  const Fp8Kind target_kind = kind_ == Fp8Kind::kE4m3Fn ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
  std::vector<float> values(kLatent + kRope, 0.0f);  // a group of zeros, and NaN in the last group
  for (int32_t i = 64; i < kLatent; ++i) values[static_cast<size_t>(i)] = std::ldexp(1.3f, i - 128);
  Encode(1, values);
  values[kLatent - 1] = std::numeric_limits<float>::quiet_NaN();
  values[kLatent] = -447.0f;
  Encode(4, values);
  std::vector<std::vector<float>> original;
  for (int32_t row = 0; row < kRows; ++row) original.push_back(Decoded(row));
  const std::vector<std::byte> bytes = bytes_;
  const float layer_scale = ScaleToKind(1.0f, target_kind);
  ConvertRows(layout_, target_kind, bytes_.data(), layout_.row_bytes, kRows, kRows);
  for (int32_t row = 0; row < kRows; ++row) {
    std::vector<float> converted(kLatent + kRope);
    DecodeKvRow(layout_, target_kind, layer_scale, {Place(row).row, Place(row).scales},
                converted.data());
    for (size_t i = 0; i < converted.size(); ++i) {
      const float want = original[static_cast<size_t>(row)][i];
      EXPECT_TRUE(converted[i] == want || (converted[i] != converted[i] && want != want))
          << row << " " << i << ": " << converted[i] << ", want " << want;
    }
  }
  EXPECT_EQ(bytes_ != bytes, layout_.traits.latent == DType::kFp8E4m3);
  ConvertRows(layout_, kind_, bytes_.data(), layout_.row_bytes, kRows, kRows);
  EXPECT_EQ(bytes_, bytes);
}

// A page with two valid rows of five: no other byte of the page changes.
TEST_P(ConvertRowsTest, OnlyTheRowsThatAreThereAreConverted) {
  const std::vector<std::byte> bytes = bytes_;
  ConvertRows(layout_, kind_, bytes_.data(), layout_.row_bytes, kRows, 2);
  std::vector<bool> theirs(bytes.size());
  for (int32_t row = 0; row < 2; ++row) {
    std::fill_n(theirs.begin() + (Place(row).row - bytes_.data()), layout_.row_bytes, true);
    std::fill_n(theirs.begin() + (Place(row).scales - bytes_.data()), layout_.groups, true);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_TRUE(theirs[i] || bytes_[i] == bytes[i]) << i;
  }
}

TEST(ConvertRows, ExponentsOfScalesMoveByOneAndNaNStays) {
  const KvRowLayout layout = MakeKvRowLayout(KvFormat::kFp8Page, 4 * 64, 8);
  std::vector<std::byte> page(static_cast<size_t>(KvPageBytes(layout, layout.row_bytes, 1)));
  const auto place = KvRowIn(layout, page.data(), layout.row_bytes, 1, 0);
  const auto converted = [&](Fp8Kind to) {
    const uint8_t bytes[] = {0, 1, 200, 255};
    std::memcpy(place.scales, bytes, sizeof(bytes));
    ConvertRows(layout, to, page.data(), layout.row_bytes, 1, 1);
    std::vector<uint8_t> out(4);
    std::memcpy(out.data(), place.scales, out.size());
    return out;
  };
  EXPECT_EQ(converted(Fp8Kind::kE4m3Fnuz), (std::vector<uint8_t>{1, 2, 201, 255}));
  EXPECT_EQ(converted(Fp8Kind::kE4m3Fn), (std::vector<uint8_t>{0, 0, 199, 255}));
}

TEST(ConvertRows, IndexKeysStandForTheSameValues) {
  constexpr int32_t kDim = 128;
  const KvRowLayout layout = MakeKvRowLayout(KvFormat::kIndexKey, kDim, 0);
  for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
    const Fp8Kind target_kind = kind == Fp8Kind::kE4m3Fn ? Fp8Kind::kE4m3Fnuz : Fp8Kind::kE4m3Fn;
    std::vector<std::byte> page(static_cast<size_t>(KvPageBytes(layout, layout.row_bytes, kRows)));
    std::vector<float> values(kDim), before(kDim), after(kDim);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.7f * static_cast<float>(i) - 40.0f;
    const auto place = KvRowIn(layout, page.data(), layout.row_bytes, kRows, 2);
    EncodeKvRow(layout, kind, values.data(), DType::kF32, 1.0f, place);
    DecodeKvRow(layout, kind, 1.0f, {place.row, place.scales}, before.data());
    ConvertRows(layout, target_kind, page.data(), layout.row_bytes, kRows, 3);
    DecodeKvRow(layout, target_kind, 1.0f, {place.row, place.scales}, after.data());
    EXPECT_EQ(after, before);
    EXPECT_NE(after[0], 0.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ConvertRowsTest,
                         testing::Combine(testing::ValuesIn(kKvFormats),
                                          testing::Values(Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz)));

}  // namespace
}  // namespace mla::kernels
