#include "kernels/host_memory/transfers.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

std::vector<std::byte> Bytes(size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<size_t>(seed));
  }
  return bytes;
}

std::vector<PartDigest> DigestsOf(std::span<const std::byte> bytes) {
  std::vector<PartDigest> digests;
  while (!bytes.empty()) {
    const size_t part = std::min(bytes.size(), static_cast<size_t>(kDigestPartBytes));
    digests.push_back(DigestOfPart(bytes.first(part)));
    bytes = bytes.subspan(part);
  }
  return digests;
}

// For any size and place, with digests and without: exactly the named bytes are copied.
TEST(TransfersTest, BytesArriveWithTheDigestsOfTheirParts) {
  constexpr size_t kPool = 20'000;
  for (const size_t size : {0, 1, 63, 64, 256, 4095, 4096, 4097, 8192, 9000, 12'544}) {
    for (const size_t offset : {0, 16, 256, 4099}) {
      for (const bool digested : {false, true}) {
        const std::vector<std::byte> sent = Bytes(size + 1, 1);
        std::vector<std::byte> pool(kPool, std::byte{9}), back(size + 2, std::byte{8});
        const auto parts = static_cast<size_t>(DigestParts(static_cast<int64_t>(size)));
        std::vector<PartDigest> in(parts + 1), out(parts + 1);
        std::vector<std::byte> host = sent;
        const PageTransfer write{static_cast<int64_t>(offset), static_cast<int64_t>(size),
                                 host.data() + 1, digested ? in.data() : nullptr};
        WritePages(pool.data(), write);
        PageTransfer read = write;
        read.host = back.data() + 1;
        read.digests = digested ? out.data() : nullptr;
        ReadPages(pool.data(), read);
        EXPECT_EQ(host, sent);
        EXPECT_TRUE(std::equal(sent.begin() + 1, sent.end(), back.begin() + 1))
            << size << " " << offset;
        EXPECT_EQ(back.front(), std::byte{8});
        EXPECT_EQ(back.back(), std::byte{8});
        EXPECT_EQ(
            std::count(pool.begin(), pool.begin() + static_cast<int64_t>(offset), std::byte{9}),
            static_cast<int64_t>(offset));
        EXPECT_EQ(pool[offset + size], std::byte{9});
        std::vector<PartDigest> want(parts + 1);
        if (digested) want = DigestsOf(std::span(sent).subspan(1));
        want.resize(parts + 1);
        EXPECT_EQ(in, want) << size << " " << offset;
        EXPECT_EQ(out, want) << size << " " << offset;
      }
    }
  }
}

TEST(TransfersTest, APieceHasItsPartOfTheDigests) {
  std::vector<std::byte> host = Bytes(10'000, 3), pool(10'000);
  std::vector<PartDigest> digests(3);
  const PageTransfer all{0, 10'000, host.data(), digests.data()};
  WritePages(pool.data(), PieceOf(all, kDigestPartBytes, 10'000 - kDigestPartBytes));
  EXPECT_EQ(digests[0], PartDigest());
  WritePages(pool.data(), PieceOf(all, 0, kDigestPartBytes));
  EXPECT_EQ(pool, host);
  EXPECT_EQ(digests, DigestsOf(host));
}

}  // namespace
}  // namespace mla::kernels
