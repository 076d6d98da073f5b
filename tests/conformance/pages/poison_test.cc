#include "tests/conformance/pages/poison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "kernels/types/launch.h"

namespace mla::conformance {
namespace {

using kernels::Fp8Kind;
using kernels::KvFormat;

TEST(PoisonTest, EveryLatentValueIsNaN) {
  for (const KvFormat format : kernels::kKvFormats) {
    for (const Fp8Kind kind : {Fp8Kind::kE4m3Fn, Fp8Kind::kE4m3Fnuz}) {
      for (const bool alternate : {false, true}) {
        const kernels::KvRowLayout at = kernels::MakeKvRowLayout(format, 512, 64);
        const std::vector<std::byte> row(static_cast<size_t>(at.row_bytes + at.page_scales_bytes),
                                         PoisonByte(format, kind, alternate));
        std::vector<float> values(576);
        DecodeKvRow(at, kind, 1.0f, kernels::KvRowIn(at, row.data(), at.row_bytes, 1, 0),
                    values.data());
        EXPECT_TRUE(std::all_of(values.begin(), values.begin() + 512,
                                [](float value) { return std::isnan(value); }))
            << kernels::Name(format) << " " << kernels::Name(kind);
      }
    }
  }
  EXPECT_NE(PoisonByte(KvFormat::kFp8Row, Fp8Kind::kE4m3Fn, false),
            PoisonByte(KvFormat::kFp8Row, Fp8Kind::kE4m3Fn, true));
}

TEST(PoisonTest, EveryByteOfThePagesIsFilledAndNoOther) {
  kernels::ReferenceBackend backend;
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = int64_t{24} << 20;
  ASSERT_TRUE(backend.Configure(limits).ok());
  std::vector<std::byte> pool(static_cast<size_t>(limits.kv_pool_bytes), std::byte{3});
  kernels::PageTransfer whole{0, limits.kv_pool_bytes, pool.data()};
  kernels::Launch launch;
  launch.page_writes = {&whole, 1};
  ASSERT_TRUE(backend.Submit(0, launch).ok());
  ASSERT_TRUE(backend.Wait(0).ok());
  // More than one launch writes, and not a multiple of a block.
  const int64_t first = kernels::kPageGranuleBytes, bytes = 17 * kPoisonBlockBytes + 4096;
  std::vector<std::byte> block(static_cast<size_t>(kPoisonBlockBytes));
  ASSERT_TRUE(PoisonPages(backend, 0, first, bytes, std::byte{0x80}, block).ok());
  launch = kernels::Launch();
  launch.page_reads = {&whole, 1};
  ASSERT_TRUE(backend.Submit(0, launch).ok());
  ASSERT_TRUE(backend.Wait(0).ok());
  const auto count = std::count(pool.begin(), pool.end(), std::byte{0x80});
  EXPECT_EQ(count, bytes);
  EXPECT_TRUE(std::all_of(pool.begin() + first, pool.begin() + first + bytes,
                          [](std::byte byte) { return byte == std::byte{0x80}; }));
}

}  // namespace
}  // namespace mla::conformance
