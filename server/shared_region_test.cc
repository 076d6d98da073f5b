// Regions: what the backend is told, and how long memory lives.
#include "server/shared_region.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace mla::server {
namespace {

constexpr int64_t kMiB = 1 << 20;

class SharedRegionTest : public ::testing::Test {
 protected:
  SharedRegionTest()
      : table_({kMiB, 4 * kMiB, 3, 2}, {[this](std::span<std::byte> memory) {
                                          mapped_.push_back(memory.data());
                                          return answer_;
                                        },
                                        [this](std::span<std::byte> memory) {
                                          // Still mapped: whoever unpins it may look at it.
                                          memory[0] = std::byte{1};
                                          unmapped_.push_back(memory.data());
                                        }}) {}

  absl::Status answer_;
  std::vector<std::byte*> mapped_, unmapped_;
  SharedRegionTable table_;
};

TEST_F(SharedRegionTest, TheBackendKnowsTheMemoryFromFirstToLast) {
  auto region = table_.Create("a", 5000, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(mapped_, std::vector<std::byte*>{(*region)->data()});
  std::byte* const at = (*region)->data();
  std::shared_ptr<SharedRegion> of_a_request = *region;
  table_.Remove(**region);
  region->reset();
  EXPECT_TRUE(unmapped_.empty()) << "a request still points into it";
  of_a_request.reset();
  EXPECT_EQ(unmapped_, std::vector<std::byte*>{at});
  EXPECT_EQ(table_.mapped_bytes(), 0);
}

TEST_F(SharedRegionTest, MemoryThatCannotBePinnedServesAllTheSame) {
  answer_ = absl::ResourceExhaustedError("no more pages may be pinned");
  auto region = table_.Create("a", 5000, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  std::fill_n((*region)->data(), (*region)->size(), std::byte{7});
  EXPECT_EQ(table_.Find("a", {reinterpret_cast<const char*>((*region)->handle().data()),
                              (*region)->handle().size()}),
            *region);
  table_.Remove(**region);
  region->reset();
  EXPECT_TRUE(unmapped_.empty()) << "what was not registered is not unregistered";
  EXPECT_EQ(table_.mapped_bytes(), 0);
  EXPECT_EQ(table_.count(), 0);
}

TEST_F(SharedRegionTest, MemoryIsBoundedForAllAndRegionsForEachTenant) {
  const auto refused = [this](const std::string& tenant, uint64_t bytes) {
    return table_.Create(tenant, bytes, 0).status().code();
  };
  EXPECT_EQ(refused("a", 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused("a", kMiB + 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused("a", std::numeric_limits<uint64_t>::max()), absl::StatusCode::kInvalidArgument);
  auto first = table_.Create("a", kMiB, 0);
  auto second = table_.Create("a", kMiB, 0);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(refused("a", 1), absl::StatusCode::kResourceExhausted);  // two of its two
  // Ring and arena of it take what is left.
  auto third = table_.Create("b", kMiB, kMiB);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(table_.mapped_bytes(), 4 * kMiB);
  EXPECT_EQ(refused("c", 1), absl::StatusCode::kResourceExhausted);
  table_.Remove(**third);
  third->reset();
  auto larger = table_.Create("b", kMiB, kMiB + 4096);
  EXPECT_EQ(larger.status().code(), absl::StatusCode::kResourceExhausted) << "2 MiB are left";
  EXPECT_EQ(table_.mapped_bytes(), 2 * kMiB);
  EXPECT_TRUE(table_.Create("b", kMiB, 4096).ok());
}

// A client that could shrink the file would kill the server with its next access.
TEST_F(SharedRegionTest, TheFileKeepsItsSize) {
  auto region = table_.Create("a", 8192, 0);
  ASSERT_TRUE(region.ok()) << region.status();
  const int file = (*region)->descriptor();
  for (const off_t size : {off_t{0}, off_t{4096}, off_t{1} << 20}) {
    EXPECT_EQ(ftruncate(file, size), -1);
    EXPECT_EQ(errno, EPERM) << size;
  }
  EXPECT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor may it become read-only";
  EXPECT_EQ(lseek(file, 0, SEEK_END), 8192);
}

TEST_F(SharedRegionTest, NothingOutsideTheArenaIsHeld) {
  auto region = table_.Create("a", 8192, 4096);
  ASSERT_TRUE(region.ok()) << region.status();
  const SharedRegion& r = **region;
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_TRUE(r.Holds(4096, 8192));
  EXPECT_TRUE(r.Holds(r.size(), 0));
  EXPECT_TRUE(r.Holds(r.size() - 1, 1));
  EXPECT_FALSE(r.Holds(4095, 1));
  EXPECT_FALSE(r.Holds(0, 0));
  EXPECT_FALSE(r.Holds(4096, 8193));
  EXPECT_FALSE(r.Holds(r.size(), 1));
  EXPECT_FALSE(r.Holds(r.size() + 1, 0));
  EXPECT_FALSE(r.Holds(kMost, 2));
  EXPECT_FALSE(r.Holds(8192, kMost));
  EXPECT_FALSE(r.Holds(8192, kMost - 8191));
}

}  // namespace
}  // namespace mla::server
