#include "kernels/formats/stored_rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

namespace mla::kernels {
namespace {

constexpr int32_t kLatent = 130, kRope = 6, kRows = 5;

class StoredRowsTest : public testing::TestWithParam<std::tuple<KvFormat, Fp8Kind>> {
 protected:
  StoredRowsTest() : bytes_(static_cast<size_t>(KvPageBytes(layout_, layout_.row_bytes, kRows))) {
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
  int64_t Poisoned() {
    return PoisonRows(layout_, kind_, bytes_.data(), layout_.row_bytes, kRows, kRows);
  }
  std::vector<float> Decoded(int32_t row) {
    std::vector<float> values(kLatent + kRope);
    DecodeKvRow(layout_, kind_, 1.0f, {Place(row).row, Place(row).scales}, values.data());
    return values;
  }

  const Fp8Kind kind_ = std::get<1>(GetParam());
  const KvRowLayout layout_ = MakeKvRowLayout(std::get<0>(GetParam()), kLatent, kRope);
  std::vector<std::byte> bytes_;
};

TEST_P(StoredRowsTest, WhatWasEncodedStays) {
  const std::vector<std::byte> before = bytes_;
  EXPECT_EQ(Poisoned(), kRows);
  EXPECT_EQ(bytes_, before);
}

TEST_P(StoredRowsTest, TheFirstRowWithNaNIsFoundWhereverItStands) {
  for (const int32_t column : {0, kLatent - 1, kLatent, kLatent + kRope - 1}) {
    for (const int32_t row : {kRows - 1, 2, 0}) {
      std::vector<float> values(kLatent + kRope, 1.0f);
      values[static_cast<size_t>(column)] = std::numeric_limits<float>::quiet_NaN();
      Encode(row, values);
      EXPECT_EQ(Poisoned(), row) << column;
    }
    Encode(0, std::vector<float>(kLatent + kRope, 1.0f));
    Encode(2, std::vector<float>(kLatent + kRope, 1.0f));
    Encode(kRows - 1, std::vector<float>(kLatent + kRope, 1.0f));
  }
}

TEST_P(StoredRowsTest, ABf16ValueBeyondTheBoundBecomesNaN) {
  if (layout_.traits.rope != DType::kBf16) return;
  for (const Bf16 value : {Bf16{0x7f80}, Bf16{0xff80}, Bf16{kStoredBound}, Bf16{0x7fff}}) {
    std::memcpy(Row(3) + layout_.rope_at, &value, sizeof(value));
    EXPECT_EQ(Poisoned(), 3);
    const float stored = Decoded(3)[kLatent];
    EXPECT_NE(stored, stored);
  }
  const Bf16 largest = kStoredBound - 1;
  std::memcpy(Row(3) + layout_.rope_at, &largest, sizeof(largest));
  EXPECT_EQ(Poisoned(), kRows);
}

TEST_P(StoredRowsTest, AScaleThatStandsForNaNIsFound) {
  if (layout_.traits.scales != KvScales::kInRow) return;
  for (const float scale : {-1.0f, std::numeric_limits<float>::quiet_NaN(), 0x1p74f}) {
    std::memcpy(Row(1) + layout_.scales_at + sizeof(float), &scale, sizeof(scale));
    EXPECT_EQ(Poisoned(), 1) << scale;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, StoredRowsTest,
                         testing::Combine(testing::ValuesIn(kKvFormats),
                                          testing::Values(Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz)));

}  // namespace
}  // namespace mla::kernels
