#include "kernels/host_memory/mapped_memory.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace mla::kernels {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Bytes of address space of this process.
int64_t MappedBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST(MappedMemoryTest, MemoryIsZeroAndAllOfItCanBeWritten) {
  for (const bool huge : {false, true}) {
    for (const int64_t bytes : {int64_t{1}, int64_t{4097}, kHugePage - 1, kHugePage, kHugePage + 1,
                                3 * kHugePage + 4097}) {
      auto memory = MappedMemory::Create("test", bytes, huge);
      ASSERT_TRUE(memory.ok()) << memory.status();
      EXPECT_EQ(memory->size(), bytes);
      auto* const data = memory->As<unsigned char>();
      EXPECT_EQ(data[0] | data[bytes / 2] | data[bytes - 1], 0) << bytes;
      data[0] = data[bytes / 2] = data[bytes - 1] = 7;
    }
  }
}

// A kernel of 32 rows reads many pages at a time, so its scratch memory should lie in huge ones
// from its first byte on.
TEST(MappedMemoryTest, HugePagesBeginWithTheMemory) {
  std::vector<MappedMemory> held;
  for (const int64_t bytes : {kHugePage, kHugePage + 1, 3 * kHugePage + 4097, 2 * kHugePage - 1}) {
    auto memory = MappedMemory::Create("test", bytes, /*huge_pages=*/true);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % kHugePage, 0u) << bytes;
    held.push_back(*std::move(memory));
  }
}

// Aligning takes address space around a mapping, which is given back at once; so is the rest at the
// end. Sizes differ, so that mappings would begin all over a huge page. Other mappings of the
// process change by far less than what aligning takes.
TEST(MappedMemoryTest, OnlyTheMemoryItselfIsMapped) {
  constexpr int64_t kCount = 16;
  const int64_t before = MappedBytes();
  int64_t wanted = 0;
  {
    std::vector<MappedMemory> held;
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t bytes = kHugePage + i * (kHugePage / kCount) + 4096;
      wanted += bytes;
      auto memory = MappedMemory::Create("test", bytes, /*huge_pages=*/true);
      ASSERT_TRUE(memory.ok()) << memory.status();
      held.push_back(*std::move(memory));
    }
    EXPECT_LT(MappedBytes() - before, wanted + kCount * (kHugePage / 4));
    EXPECT_GE(MappedBytes() - before, wanted);
  }
  EXPECT_LT(MappedBytes() - before, wanted / 4);
}

TEST(MappedMemoryTest, NothingAndNegativeSizes) {
  auto none = MappedMemory::Create("test", 0, true);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->data(), nullptr);
  EXPECT_FALSE(MappedMemory::Create("test", -1, true).ok());
  EXPECT_EQ(MappedMemory::Create("test", INT64_MAX / 2, true).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace mla::kernels
